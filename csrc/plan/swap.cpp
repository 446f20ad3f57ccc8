#include "plan/swap.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace noria {
namespace {

/// Returns the bytes per step that need no swap if the block is recomputed.
double saving_of(const SavedBlock& block) {
  return static_cast<double>((block.bytes - block.inputs).count) * block.num_visits;
}

double price_of(const SavedBlock& block) { return block.forward_us * block.num_visits; }

double bytes_of(const SavedBlock& block) { return static_cast<double>(block.bytes.count) * block.num_visits; }

/// Returns the stall of one visit. `both_us_per_byte`: the time of the copies of one byte, out and back.
double stall_of(const SavedBlock& block, double both_us_per_byte) {
  return std::max(static_cast<double>(block.bytes.count) * both_us_per_byte - block.gap_us, 0.0);
}

/// Returns the stall that each byte at peers saves this block.
double relief_of(const SavedBlock& block, const Swaps& swaps) {
  const double at_home = stall_of(block, swaps.host.out_us_per_byte + swaps.host.back_us_per_byte);
  const double at_peers = stall_of(block, 2 * swaps.peers.us_per_byte);
  return block.bytes > Bytes{0} ? (at_home - at_peers) / static_cast<double>(block.bytes.count) : 0;
}

class Search {
 public:
  Search(const std::vector<SavedBlock>& blocks, const Swaps& swaps)
      : blocks_(blocks),
        swaps_(swaps),
        best_(blocks.size(), Way::peers),
        least_us_(cost_us(blocks, swaps, best_)) {}

  /// Tries these blocks as recomputed. All others go to peers at first, then all but the one that peers help least, and
  /// so on.
  void look(const std::vector<std::size_t>& recomputed) {
    std::vector<Way> ways(blocks_.size(), Way::peers);
    for (std::size_t block : recomputed) ways[block] = Way::recompute;
    keep(ways);
    if (swaps_.peers.bytes == Bytes{0}) return;
    for (std::size_t block : by_relief_) {
      if (ways[block] != Way::peers) continue;
      ways[block] = Way::host;
      keep(ways);
    }
  }

  /// Changes one block at a time, as long as that is cheaper. Returns the best ways.
  std::vector<Way> improved() {
    for (bool is_better = true; is_better;) {
      is_better = false;
      for (std::size_t block = 0; block < blocks_.size(); ++block) {
        for (const Way way : kWays) {
          if (way == Way::recompute && saving_of(blocks_[block]) <= 0) continue;
          std::vector<Way> ways = best_;
          ways[block] = way;
          is_better |= keep(ways);
        }
      }
    }
    return best_;
  }

 private:
  static constexpr std::array<Way, 3> kWays{Way::peers, Way::host, Way::recompute};

  bool keep(const std::vector<Way>& ways) {
    const double us = cost_us(blocks_, swaps_, ways);
    if (us >= least_us_) return false;
    least_us_ = us;
    best_ = ways;
    return true;
  }

  std::vector<std::size_t> order_by_relief() const {
    std::vector<std::size_t> order(blocks_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return relief_of(blocks_[a], swaps_) < relief_of(blocks_[b], swaps_);
    });
    return order;
  }

  const std::vector<SavedBlock>& blocks_;
  const Swaps& swaps_;
  const std::vector<std::size_t> by_relief_ = order_by_relief();  // least first
  std::vector<Way> best_;
  double least_us_;
};

}  // namespace

double cost_us(const std::vector<SavedBlock>& blocks, const Swaps& swaps, const std::vector<Way>& ways) {
  const auto& [bytes, host, peers] = swaps;
  double again_us = 0, saved = 0, left = 0, sent = 0;  // `sent`: to peers, if they have room
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (ways[i] == Way::recompute) again_us += price_of(blocks[i]), saved += saving_of(blocks[i]);
    else left += bytes_of(blocks[i]);
    if (ways[i] == Way::peers) sent += bytes_of(blocks[i]);
  }
  const double swapped = std::max(static_cast<double>(bytes.count) - saved, 0.0);
  const double share = left > 0 ? std::min(swapped / left, 1.0) : 0.0;
  sent *= share;
  const auto room = static_cast<double>(peers.bytes.count);
  const double there = sent > room ? room / sent : 1.0;  // the part of `sent` for which peers have room
  double short_us = 0;                                   // stalls: copies that do not fit in the gaps
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (ways[i] == Way::recompute) continue;
    const double at_peers = ways[i] == Way::peers ? there : 0;
    const double stall_us = at_peers * stall_of(blocks[i], 2 * peers.us_per_byte) +
                            (1 - at_peers) * stall_of(blocks[i], host.out_us_per_byte + host.back_us_per_byte);
    short_us += share * blocks[i].num_visits * stall_us;
  }
  const double to_peers = std::min(sent, room), to_host = swapped - to_peers;
  return again_us + std::max({short_us, to_host * host.out_us_per_byte - host.out_free_us,
                              to_host * host.back_us_per_byte - host.back_free_us,
                              2 * to_peers * peers.us_per_byte - peers.free_us});
}

std::vector<Way> choose_ways(const std::vector<SavedBlock>& blocks, const Swaps& swaps) {
  std::vector<std::size_t> order(blocks.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::erase_if(order, [&](std::size_t block) { return saving_of(blocks[block]) <= 0; });
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return price_of(blocks[a]) * saving_of(blocks[b]) < price_of(blocks[b]) * saving_of(blocks[a]);
  });
  Search search(blocks, swaps);
  std::vector<std::size_t> recomputed;
  search.look(recomputed);
  for (std::size_t block : order) {
    recomputed.push_back(block);
    search.look(recomputed);
  }
  return search.improved();
}

}  // namespace noria
