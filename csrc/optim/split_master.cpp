#include "optim/split_master.h"

#include <bit>

namespace noria {

void split_master(const float* master, std::uint16_t* high, std::uint16_t* low, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(master[i]);
    high[i] = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
    if (low != nullptr) low[i] = static_cast<std::uint16_t>(bits);
  }
}

void join_master(const std::uint16_t* high, const std::uint16_t* low, float* master, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto remainder = static_cast<std::int32_t>(static_cast<std::int16_t>(low[i]));
    master[i] =
        std::bit_cast<float>((static_cast<std::uint32_t>(high[i]) << 16) + static_cast<std::uint32_t>(remainder));
  }
}

}  // namespace noria
