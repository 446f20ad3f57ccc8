// Blocks are computed again where that is cheaper than the stalls of swapping them, and only then; peers' room is for
// those that it helps most.
#include "plan/swap.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace noria {
namespace {

using Chosen = std::vector<std::size_t>;
using Ways = std::vector<Way>;

SavedBlock block(std::int64_t bytes, double forward_us, double gap_us = 1e9, std::int64_t inputs = 0) {
  return {Bytes{bytes}, Bytes{inputs}, 1, forward_us, gap_us};
}

Swaps host(std::int64_t bytes, double us_per_byte, double free_us) {
  return {Bytes{bytes}, {us_per_byte, us_per_byte, free_us, free_us}, {}};
}

Swaps with_peers(Swaps swaps, std::int64_t bytes, double us_per_byte, double free_us = 1e9) {
  swaps.peers = {Bytes{bytes}, us_per_byte, free_us};
  return swaps;
}

Chosen recomputed(const std::vector<SavedBlock>& blocks, const Swaps& swaps) {
  const Ways ways = choose_ways(blocks, swaps);
  Chosen chosen;
  for (std::size_t i = 0; i < ways.size(); ++i) {
    if (ways[i] == Way::recompute) chosen.push_back(i);
  }
  return chosen;
}

/// Of all choices.
double least_us(const std::vector<SavedBlock>& blocks, const Swaps& swaps) {
  Ways ways(blocks.size(), Way::peers);
  double least = cost_us(blocks, swaps, ways);
  const auto num_choices = static_cast<int>(std::pow(3, blocks.size()));
  for (int choice = 0; choice < num_choices; ++choice) {
    int rest = choice;
    for (Way& way : ways) {
      way = static_cast<Way>(rest % 3);
      rest /= 3;
    }
    least = std::min(least, cost_us(blocks, swaps, ways));
  }
  return least;
}

TEST(Swap, nothing_is_computed_again_while_copies_hide) {
  const std::vector<SavedBlock> blocks(4, block(100, 10));
  EXPECT_EQ(recomputed(blocks, host(400, 1, 400)), Chosen{});
  EXPECT_EQ(recomputed(blocks, host(0, 1, 0)), Chosen{});
}

TEST(Swap, as_much_is_computed_again_as_ends_the_stalls_and_no_more) {
  const std::vector<SavedBlock> blocks(4, block(100, 10));
  EXPECT_EQ(recomputed(blocks, host(400, 1, 300)), Chosen{0});
  EXPECT_EQ(recomputed(blocks, host(400, 1, 250)), (Chosen{0, 1}));
  EXPECT_EQ(recomputed(blocks, host(400, 1, 0)), (Chosen{0, 1, 2, 3}));
}

TEST(Swap, what_costs_more_than_the_stall_is_swapped) {
  const std::vector<SavedBlock> blocks(4, block(100, 150));
  EXPECT_EQ(recomputed(blocks, host(400, 1, 0)), Chosen{});
  EXPECT_EQ(recomputed(blocks, host(400, 2, 0)), (Chosen{0, 1, 2, 3}));
}

TEST(Swap, the_cheapest_to_compute_again_for_each_byte_comes_first) {
  const std::vector<SavedBlock> blocks{block(100, 30), block(200, 20), block(100, 5), block(100, 1, 1e9, 99)};
  EXPECT_EQ(recomputed(blocks, host(500, 1, 400)), Chosen{2});
  EXPECT_EQ(recomputed(blocks, host(500, 1, 250)), (Chosen{1, 2}));
}

TEST(Swap, a_block_that_keeps_more_than_it_saves_is_never_computed_again) {
  EXPECT_EQ(recomputed({block(100, 0, 1e9, 100), block(100, 0, 1e9, 200)}, host(200, 10, 0)), Chosen{});
}

TEST(Swap, a_short_gap_is_a_stall_although_the_link_has_time) {
  // There and back take 200 us, the block is away for 150: 50 us of stall.
  EXPECT_EQ(recomputed({block(100, 40, 150)}, host(100, 1, 1e9)), Chosen{0});
  EXPECT_EQ(recomputed({block(100, 60, 150)}, host(100, 1, 1e9)), Chosen{});
  EXPECT_EQ(recomputed({block(100, 40, 200)}, host(100, 1, 1e9)), Chosen{});
}

TEST(Swap, peers_have_room_for_whom_the_host_would_hold_up) {
  // 200 us to the host and back: the second and the last have less. To a peer it takes 50, and there is room for two.
  const std::vector<SavedBlock> blocks{block(100, 1e6, 500), block(100, 1e6, 60), block(100, 1e6, 300),
                                       block(100, 1e6, 90)};
  const Swaps swaps = with_peers(host(400, 1, 1e9), 200, 0.25);
  EXPECT_EQ(choose_ways(blocks, swaps), (Ways{Way::host, Way::peers, Way::host, Way::peers}));
  EXPECT_EQ(cost_us(blocks, swaps, choose_ways(blocks, swaps)), 0);
  // All have half of the room: half of each stall.
  EXPECT_EQ(cost_us(blocks, swaps, Ways(4, Way::peers)), (140 + 110) / 2);
}

TEST(Swap, where_peers_have_room_for_all_or_nothing_stalls_all_go_there) {
  const std::vector<SavedBlock> blocks{block(100, 1e6, 500), block(100, 1e6, 60)};
  EXPECT_EQ(choose_ways(blocks, with_peers(host(200, 1, 1e9), 200, 0.25)), Ways(2, Way::peers));
  EXPECT_EQ(choose_ways({blocks[0], blocks[0]}, with_peers(host(200, 1, 1e9), 100, 0.25)), Ways(2, Way::peers));
}

TEST(Swap, the_time_of_the_peers_link_counts_too) {
  const std::vector<SavedBlock> blocks(4, block(100, 1e6));
  const auto num_at_peers = [&](double free_us) {
    const Ways ways = choose_ways(blocks, with_peers(host(400, 0.5, 1e9), 400, 0.5, free_us));
    return std::count(ways.begin(), ways.end(), Way::peers);
  };
  EXPECT_EQ(num_at_peers(400), 4);  // there and back at 0.5 us a byte
  EXPECT_EQ(num_at_peers(200), 2);
  EXPECT_EQ(num_at_peers(0), 0);
  const std::vector<SavedBlock> cheap(4, block(100, 10));
  EXPECT_EQ(recomputed(cheap, with_peers(host(400, 10, 0), 400, 0.5, 200)), (Chosen{0, 1}));
}

TEST(Swap, no_choice_is_cheaper_where_blocks_are_alike) {
  std::mt19937 random(1);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same cases each time
  for (int round = 0; round < 300; ++round) {
    const auto bytes = static_cast<std::int64_t>(1 + random() % 1000);
    const std::vector<SavedBlock> blocks(
        1 + random() % 6, block(bytes, static_cast<double>(random() % 2000), static_cast<double>(random() % 4000)));
    const Swaps swaps =
        with_peers(host(static_cast<std::int64_t>(random() % 8000), 1, static_cast<double>(random() % 8000)),
                   static_cast<std::int64_t>(random() % 4000), 0.25, static_cast<double>(random() % 2000));
    EXPECT_DOUBLE_EQ(cost_us(blocks, swaps, choose_ways(blocks, swaps)), least_us(blocks, swaps)) << "round " << round;
  }
}

TEST(Swap, no_other_way_for_a_single_block_is_cheaper) {
  std::mt19937 random(2);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same cases each time
  for (int round = 0; round < 300; ++round) {
    std::vector<SavedBlock> blocks;
    Bytes all;
    for (std::size_t i = 1 + random() % 5; i > 0; --i) {
      blocks.push_back(block(static_cast<std::int64_t>(1 + random() % 1000), static_cast<double>(random() % 2000),
                             static_cast<double>(random() % 4000), static_cast<std::int64_t>(random() % 100)));
      all += blocks.back().bytes;
    }
    const Swaps swaps =
        with_peers(host(all.count, 1, static_cast<double>(random() % 4000)), static_cast<std::int64_t>(random() % 2000),
                   0.25, static_cast<double>(random() % 2000));
    const Ways ways = choose_ways(blocks, swaps);
    const double cost = cost_us(blocks, swaps, ways);
    EXPECT_LE(cost, cost_us(blocks, swaps, Ways(blocks.size(), Way::peers)));
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      for (const Way way : {Way::peers, Way::host, Way::recompute}) {
        Ways other = ways;
        other[i] = way;
        if (way == Way::recompute && blocks[i].inputs >= blocks[i].bytes) continue;
        EXPECT_LE(cost, cost_us(blocks, swaps, other)) << "round " << round;
      }
    }
  }
}

}  // namespace
}  // namespace noria
