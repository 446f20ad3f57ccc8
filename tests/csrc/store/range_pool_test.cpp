#include "store/range_pool.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace noria {
namespace {

TEST(RangePool, ranges_are_aligned_disjoint_and_the_same_for_the_same_calls) {
  std::vector<std::byte> memory(1 << 16);
  std::vector<std::int64_t> first;
  for (int turn = 0; turn < 2; ++turn) {
    RangePool pool;
    pool.add(memory.data(), Bytes{1 << 15});
    std::mt19937 random(1);
    std::vector<RangePool::Range> taken;
    std::vector<std::int64_t> offsets;
    bool has_grown = false;
    for (int i = 0; i < 2000; ++i) {
      if (random() % 2 == 0 && !taken.empty()) {
        std::swap(taken[random() % taken.size()], taken.back());
        pool.give_back(taken.back());
        taken.pop_back();
        continue;
      }
      const Bytes bytes{static_cast<std::int64_t>(random() % 5000)};
      auto range = pool.take(bytes);
      if (!range && !has_grown) {
        has_grown = true;
        pool.add(memory.data() + (1 << 15), Bytes{1 << 15});
        range = pool.take(bytes);
      }
      if (!range) continue;
      EXPECT_GE(range->bytes, bytes);
      EXPECT_EQ(range->offset.count % kTensorAlignment.count, 0);
      EXPECT_EQ(range->memory - memory.data(), range->offset.count);
      for (const RangePool::Range& other : taken) {
        EXPECT_TRUE(range->offset + range->bytes <= other.offset || other.offset + other.bytes <= range->offset);
      }
      offsets.push_back(range->offset.count);
      taken.push_back(*range);
    }
    EXPECT_TRUE(has_grown);
    EXPECT_EQ(pool.size(), Bytes{1 << 16});
    for (const RangePool::Range& range : taken) pool.give_back(range);
    EXPECT_EQ(pool.taken(), Bytes{});
    EXPECT_TRUE(pool.take(Bytes{1 << 15}).has_value());  // all in one again
    if (turn == 0) first = offsets;
    EXPECT_EQ(offsets, first);
  }
}

}  // namespace
}  // namespace noria
