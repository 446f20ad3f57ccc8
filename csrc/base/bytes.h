// Bytes holds an amount of memory or an offset in it, so that neither is mistaken for a count of elements.
//
// Units: bytes everywhere; `to_string` prints binary units (KiB, MiB, GiB).
#pragma once

#include <compare>
#include <cstdint>
#include <string>

namespace noria {

struct Bytes {
  std::int64_t count = 0;

  constexpr auto operator<=>(const Bytes&) const = default;
  constexpr Bytes& operator+=(Bytes other) {
    count += other.count;
    return *this;
  }
  constexpr Bytes& operator-=(Bytes other) {
    count -= other.count;
    return *this;
  }
  friend constexpr Bytes operator+(Bytes a, Bytes b) { return {a.count + b.count}; }
  friend constexpr Bytes operator-(Bytes a, Bytes b) { return {a.count - b.count}; }
  friend constexpr Bytes operator*(Bytes a, std::int64_t n) { return {a.count * n}; }
};

/// Returns the smallest multiple of `alignment` (a power of two) that holds `amount`.
constexpr Bytes align_up(Bytes amount, Bytes alignment) {
  return {(amount.count + alignment.count - 1) & -alignment.count};
}

/// Every tensor inside a lease, a gradient buffer or the home starts at a multiple of this. Libraries choose kernels by
/// the alignment of their operands, so a smaller alignment would change bits.
inline constexpr Bytes kTensorAlignment{512};

/// Returns text such as "812.0 MiB". An amount below 1 KiB is printed in exact bytes.
std::string to_string(Bytes amount);

}  // namespace noria
