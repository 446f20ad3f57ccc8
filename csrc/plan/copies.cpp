#include "plan/copies.h"

#include <algorithm>
#include <numeric>

namespace noria {

std::vector<std::size_t> choose_copies(const std::vector<FetchedUnit>& units, const FetchLinks& links, Bytes room) {
  if (links.peer_us_per_byte > links.home_us_per_byte) return {};
  const auto fetched = [&](std::size_t unit) {
    return static_cast<double>(units[unit].bytes.count) * units[unit].num_fetches;
  };
  double home_us = links.home_us, peer_us = links.peer_us;
  for (std::size_t unit = 0; unit < units.size(); ++unit) home_us += fetched(unit) * links.home_us_per_byte;
  std::vector<std::size_t> order(units.size()), chosen;
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return units[a].num_fetches > units[b].num_fetches; });
  for (std::size_t unit : order) {
    const Bytes bytes = align_up(units[unit].bytes, kTensorAlignment);
    if (units[unit].num_fetches < 2 || bytes > room) continue;
    const double less_us = (fetched(unit) - static_cast<double>(units[unit].bytes.count)) * links.home_us_per_byte;
    const double more_us = fetched(unit) * links.peer_us_per_byte;  // once there, and n - 1 times back
    if (std::max(home_us - less_us, peer_us + more_us) >= std::max(home_us, peer_us)) continue;
    home_us -= less_us;
    peer_us += more_us;
    room = room - bytes;
    chosen.push_back(unit);
  }
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

}  // namespace noria
