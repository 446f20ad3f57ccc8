#include "base/checksum.h"

#include <array>
#include <cstring>

namespace noria {
namespace {

constexpr std::size_t kLanes = 4;  // chains of multiplications that the processor works on at once
constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15;

// Both halves of the product count, so that each bit of the word reaches all bits of the sum.
std::uint64_t mix(std::uint64_t sum, std::uint64_t word) {
  const unsigned __int128 product = static_cast<unsigned __int128>(sum ^ word) * kOdd;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

}  // namespace

std::uint64_t checksum(const std::byte* memory, Bytes bytes) {
  std::array<std::uint64_t, kLanes> sums{};
  for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] = (lane + 1) * kOdd;
  std::array<std::uint64_t, kLanes> words{};
  const auto count = static_cast<std::size_t>(bytes.count);
  std::size_t at = 0;
  for (; at + sizeof words <= count; at += sizeof words) {
    std::memcpy(words.data(), memory + at, sizeof words);
    for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] = mix(sums[lane], words[lane]);
  }
  words = {};
  if (at < count) std::memcpy(words.data(), memory + at, count - at);
  std::uint64_t sum = count;
  for (std::size_t lane = 0; lane < kLanes; ++lane) sum = mix(sum, mix(sums[lane], words[lane]));
  return sum;
}

}  // namespace noria
