#include "store/range_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "base/errors.h"

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

TEST(RangePool, a_pool_that_has_shrunk_hands_out_nothing_beyond_and_knows_what_lies_there_still) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::vector<std::byte> memory(1 << 16);
    RangePool pool;
    pool.add(memory.data(), Bytes{1 << 15});
    pool.add(memory.data() + (1 << 15), Bytes{1 << 15});
    std::mt19937 random(seed);
    std::vector<RangePool::Range> taken;
    Bytes size{1 << 16};
    const auto expected_beyond = [&] {
      Bytes beyond;
      for (const auto& each : taken) beyond += std::max(each.offset + each.bytes - std::max(each.offset, size), {});
      return beyond;
    };
    for (int i = 0; i < 400; ++i) {
      if (i % 100 == 99) {
        size = Bytes{static_cast<std::int64_t>(random() % static_cast<unsigned>(size.count + 1))};
        pool.shrink(size);
      } else if (random() % 2 == 0 && !taken.empty()) {
        std::swap(taken[random() % taken.size()], taken.back());
        pool.give_back(taken.back());
        taken.pop_back();
      } else if (auto range = pool.take(Bytes{static_cast<std::int64_t>(random() % 5000)})) {
        EXPECT_LE(range->offset + range->bytes, size);
        taken.push_back(*range);
      }
      EXPECT_EQ(pool.size(), size);
      EXPECT_EQ(pool.taken_beyond(), expected_beyond());
    }
    for (const RangePool::Range& range : taken) pool.give_back(range);
    EXPECT_EQ(pool.taken(), Bytes{});
    EXPECT_EQ(pool.taken_beyond(), Bytes{});
    EXPECT_THROW(pool.shrink(size + Bytes{1}), InvariantError);
    EXPECT_THROW(pool.add(memory.data(), Bytes{512}), InvariantError);
  }
}

}  // namespace
}  // namespace noria
