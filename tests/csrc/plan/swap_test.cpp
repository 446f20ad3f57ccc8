// Blocks are computed again where that is cheaper than the stalls of swapping them, and only then.
#include "plan/recompute.h"

#include <gtest/gtest.h>

#include <random>

namespace noria {
namespace {

using Chosen = std::vector<std::size_t>;

SavedBlock block(std::int64_t bytes, double forward_us, double gap_us = 1e9, std::int64_t inputs = 0) {
  return {Bytes{bytes}, Bytes{inputs}, 1, forward_us, gap_us};
}

SwapLink link(std::int64_t bytes, double us_per_byte, double free_us) {
  return {Bytes{bytes}, us_per_byte, us_per_byte, free_us, free_us};
}

TEST(Recompute, nothing_is_computed_again_while_copies_hide) {
  const std::vector<SavedBlock> blocks(4, block(100, 10));
  EXPECT_EQ(choose_recomputed(blocks, link(400, 1, 400)), Chosen{});
  EXPECT_EQ(choose_recomputed(blocks, link(0, 1, 0)), Chosen{});
}

TEST(Recompute, as_much_as_ends_the_stalls_and_no_more) {
  const std::vector<SavedBlock> blocks(4, block(100, 10));
  EXPECT_EQ(choose_recomputed(blocks, link(400, 1, 300)), Chosen{0});
  EXPECT_EQ(choose_recomputed(blocks, link(400, 1, 250)), (Chosen{0, 1}));
  EXPECT_EQ(choose_recomputed(blocks, link(400, 1, 0)), (Chosen{0, 1, 2, 3}));
}

TEST(Recompute, what_costs_more_than_the_stall_is_swapped) {
  const std::vector<SavedBlock> blocks(4, block(100, 150));
  EXPECT_EQ(choose_recomputed(blocks, link(400, 1, 0)), Chosen{});
  EXPECT_EQ(choose_recomputed(blocks, link(400, 2, 0)), (Chosen{0, 1, 2, 3}));
}

TEST(Recompute, the_cheapest_for_each_byte_comes_first) {
  const std::vector<SavedBlock> blocks{block(100, 30), block(200, 20), block(100, 5), block(100, 1, 1e9, 99)};
  EXPECT_EQ(choose_recomputed(blocks, link(500, 1, 400)), Chosen{2});
  EXPECT_EQ(choose_recomputed(blocks, link(500, 1, 250)), (Chosen{1, 2}));
}

TEST(Recompute, a_block_that_keeps_more_than_it_saves_is_never_computed_again) {
  EXPECT_EQ(choose_recomputed({block(100, 0, 1e9, 100), block(100, 0, 1e9, 200)}, link(200, 10, 0)), Chosen{});
}

TEST(Recompute, a_short_gap_is_a_stall_although_the_link_has_time) {
  // There and back take 200 us, the block is away for 150: 50 us of stall.
  EXPECT_EQ(choose_recomputed({block(100, 40, 150)}, link(100, 1, 1e9)), Chosen{0});
  EXPECT_EQ(choose_recomputed({block(100, 60, 150)}, link(100, 1, 1e9)), Chosen{});
  EXPECT_EQ(choose_recomputed({block(100, 40, 200)}, link(100, 1, 1e9)), Chosen{});
}

TEST(Recompute, no_single_block_more_or_less_is_cheaper_where_blocks_are_alike) {
  std::mt19937 random(1);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same cases each time
  for (int round = 0; round < 200; ++round) {
    const auto bytes = static_cast<std::int64_t>(1 + random() % 1000);
    const std::vector<SavedBlock> blocks(
        1 + random() % 8, block(bytes, static_cast<double>(random() % 2000), static_cast<double>(random() % 4000)));
    const SwapLink way = link(static_cast<std::int64_t>(random() % 8000), 1, static_cast<double>(random() % 8000));
    Chosen chosen = choose_recomputed(blocks, way);
    const double cost = cost_us(blocks, way, chosen);
    Chosen other;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      EXPECT_LE(cost, cost_us(blocks, way, other)) << "round " << round;
      other.push_back(i);
    }
    EXPECT_LE(cost, cost_us(blocks, way, other)) << "round " << round;
  }
}

}  // namespace
}  // namespace noria
