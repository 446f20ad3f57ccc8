// Checksums see every change of a bit.
#include "base/checksum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace noria {
namespace {

std::uint64_t sum_of(const std::vector<std::byte>& bytes) {
  return checksum(bytes.data(), Bytes{static_cast<std::int64_t>(bytes.size())});
}

TEST(Checksum, differs_if_any_bit_does) {
  for (const std::size_t size : {1U, 31U, 32U, 33U, 300U}) {
    std::vector<std::byte> bytes(size);
    std::set<std::uint64_t> seen{sum_of(bytes)};
    for (std::size_t bit = 0; bit < size * 8; ++bit) {
      bytes[bit / 8] ^= std::byte{1} << bit % 8;
      EXPECT_TRUE(seen.insert(sum_of(bytes)).second) << size << " bytes, bit " << bit;
      bytes[bit / 8] ^= std::byte{1} << bit % 8;
    }
  }
}

TEST(Checksum, differs_if_the_same_bit_of_any_two_words_does) {
  std::vector<std::byte> bytes(512);
  const std::uint64_t sum = sum_of(bytes);
  for (std::size_t bit = 0; bit < 64; ++bit) {
    for (std::size_t one = 0; one < bytes.size(); one += 8) {
      for (std::size_t other = 0; other < one; other += 8) {
        for (const std::size_t word : {one, other}) bytes[word + bit / 8] ^= std::byte{1} << bit % 8;
        EXPECT_NE(sum_of(bytes), sum) << bit;
        for (const std::size_t word : {one, other}) bytes[word + bit / 8] ^= std::byte{1} << bit % 8;
      }
    }
  }
}

TEST(Checksum, differs_if_zeros_are_added_or_words_change_places) {
  std::set<std::uint64_t> seen;
  for (std::size_t size = 0; size < 200; ++size) EXPECT_TRUE(seen.insert(sum_of(std::vector<std::byte>(size))).second);
  std::vector<std::byte> bytes(256);
  for (std::size_t at = 0; at < bytes.size(); ++at) bytes[at] = static_cast<std::byte>(at);
  const std::uint64_t sum = sum_of(bytes);
  std::swap_ranges(bytes.begin(), bytes.begin() + 8, bytes.begin() + 8);
  EXPECT_NE(sum_of(bytes), sum);
  std::swap_ranges(bytes.begin(), bytes.begin() + 8, bytes.begin() + 8);
  std::swap_ranges(bytes.begin() + 64, bytes.begin() + 72, bytes.begin() + 128);
  EXPECT_NE(sum_of(bytes), sum);
}

}  // namespace
}  // namespace noria
