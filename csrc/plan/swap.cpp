#include "plan/recompute.h"

#include <algorithm>
#include <numeric>

namespace noria {
namespace {

/// What is not there to be swapped if the block is computed again, of a step.
double saving_of(const SavedBlock& block) {
  return static_cast<double>((block.bytes - block.inputs).count) * block.num_visits;
}

double price_of(const SavedBlock& block) { return block.forward_us * block.num_visits; }

}  // namespace

double cost_us(const std::vector<SavedBlock>& blocks, const SwapLink& link,
               const std::vector<std::size_t>& recomputed) {
  std::vector<bool> is_again(blocks.size(), false);
  double again_us = 0, saved = 0, left = 0;
  for (std::size_t block : recomputed) is_again[block] = true;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (is_again[i]) again_us += price_of(blocks[i]), saved += saving_of(blocks[i]);
    else left += static_cast<double>(blocks[i].bytes.count) * blocks[i].num_visits;
  }
  const double swapped = std::max(static_cast<double>(link.bytes.count) - saved, 0.0);
  const double share = left > 0 ? std::min(swapped / left, 1.0) : 0.0;
  double short_us = 0;  // what does not fit the gaps
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (is_again[i]) continue;
    const double both_us = static_cast<double>(blocks[i].bytes.count) * (link.out_us_per_byte + link.back_us_per_byte);
    short_us += share * blocks[i].num_visits * std::max(both_us - blocks[i].gap_us, 0.0);
  }
  return again_us + std::max({short_us, swapped * link.out_us_per_byte - link.out_free_us,
                              swapped * link.back_us_per_byte - link.back_free_us});
}

std::vector<std::size_t> choose_recomputed(const std::vector<SavedBlock>& blocks, const SwapLink& link) {
  std::vector<std::size_t> order(blocks.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::erase_if(order, [&](std::size_t block) { return saving_of(blocks[block]) <= 0; });
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return price_of(blocks[a]) * saving_of(blocks[b]) < price_of(blocks[b]) * saving_of(blocks[a]);
  });
  std::vector<std::size_t> chosen, best;
  double least_us = cost_us(blocks, link, {});
  for (std::size_t block : order) {
    chosen.push_back(block);
    const double us = cost_us(blocks, link, chosen);
    if (us >= least_us) continue;
    least_us = us;
    best = chosen;
  }
  std::sort(best.begin(), best.end());
  return best;
}

}  // namespace noria
