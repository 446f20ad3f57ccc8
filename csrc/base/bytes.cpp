#include "base/bytes.h"

#include <array>
#include <cmath>
#include <cstdio>

namespace noria {

std::string to_string(Bytes amount) {
  constexpr std::array kUnits{"KiB", "MiB", "GiB"};
  if (std::abs(amount.count) < 1024) return std::to_string(amount.count) + " B";
  double value = static_cast<double>(amount.count) / 1024;
  std::size_t unit = 0;
  // 1023.95 would print as 1024.0, so the printed number decides when the next unit is used.
  while (std::abs(value) >= 1023.95 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), "%.1f %s", value, kUnits[unit]);
  return text.data();
}

}  // namespace noria
