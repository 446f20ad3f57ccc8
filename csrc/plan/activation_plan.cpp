#include "plan/activation_plan.h"

#include <algorithm>
#include <numeric>

namespace noria {
namespace {

constexpr std::int64_t kMostWorking = 4;  // bundles on the device without a room: one stays, one is saved, two leave

}  // namespace

Bytes SavedRoom::most() const { return room.value_or(largest * kMostWorking); }

Bytes SavedRoom::may_stay(Bytes most_saved) const {
  if (!room) return {};
  return most_saved <= *room ? *room : *room - largest * 2;
}

bool SavedRoom::has_room_ahead(Bytes there, Bytes coming) const { return there + coming + largest * 2 <= most(); }

Bytes bytes_to_leave(Bytes there, Bytes leaving, Bytes more, Bytes room) {
  return std::max(there - leaving + more - room, Bytes{0});
}

std::size_t farthest(const std::vector<std::int64_t>& forwards, const BackwardOrder& order) {
  const auto found = std::max_element(forwards.begin(), forwards.end(), [&](std::int64_t one, std::int64_t other) {
    return order.comes_before(one, other);
  });  // the first of its forward
  return static_cast<std::size_t>(found - forwards.begin());
}

std::vector<std::size_t> enough(const std::vector<Bytes>& sizes, Bytes least) {
  std::vector<std::size_t> left(sizes.size());
  std::iota(left.begin(), left.end(), std::size_t{0});
  std::stable_sort(left.begin(), left.end(), [&](std::size_t a, std::size_t b) { return sizes[a] < sizes[b]; });
  std::vector<std::size_t> found;
  while (least > Bytes{0} && !left.empty()) {
    auto next = std::find_if(left.begin(), left.end(), [&](std::size_t each) { return sizes[each] >= least; });
    if (next == left.end()) --next;
    least = least - sizes[*next];
    found.push_back(*next);
    left.erase(next);
  }
  return found;
}

std::optional<std::size_t> next_used(const std::vector<SavedBundle>& bundles, HookId hook, const IsAlive& is_alive) {
  std::optional<std::size_t> found;
  for (std::size_t i = 0; i < bundles.size(); ++i) {
    if (bundles[i].hook != hook || bundles[i].is_used || !is_alive(i)) continue;
    if (found && bundles[*found].forward != bundles[i].forward) break;
    found = i;
  }
  return found;
}

std::optional<std::size_t> needed_after(const std::vector<SavedBundle>& bundles, std::size_t used,
                                        const BackwardOrder& order, const IsAlive& is_alive) {
  const auto is_needed = [&](std::size_t i) { return !bundles[i].is_used && is_alive(i); };
  const std::int64_t forward = bundles[used].forward;
  for (std::size_t i = used; i > 0 && bundles[i - 1].forward == forward; --i) {
    if (is_needed(i - 1)) return i - 1;
  }
  std::optional<std::size_t> found;
  for (std::size_t i = 0; i < bundles.size(); ++i) {
    if (!order.comes_before(forward, bundles[i].forward) || !is_needed(i)) continue;
    if (!found || !order.comes_before(bundles[*found].forward, bundles[i].forward)) found = i;
  }
  if (found && order.awaits_one_before(bundles[*found].forward)) return std::nullopt;
  return found;
}

}  // namespace noria
