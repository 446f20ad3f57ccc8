#include "plan/backward_order.h"

#include <algorithm>
#include <utility>

namespace noria {

void BackwardOrder::begin_forward(bool is_new_round) {
  ++newest_;
  if (is_new_round) {
    if (num_backwards_ > 0) expected_ = std::exchange(places_, {});  // else no backward of that round was meant to come
    places_.clear();
    num_backwards_ = 0;
    first_ = newest_;
  }
  places_.push_back(kNever);
}

void BackwardOrder::note_backward(std::int64_t forward) {
  if (forward < first_) return;  // another backward through a graph that was kept
  std::int64_t& place = places_[static_cast<std::size_t>(forward - first_)];
  if (place == kNever) place = num_backwards_++;
}

std::int64_t BackwardOrder::place(std::int64_t forward) const {
  const std::int64_t nth = forward - first_;
  if (nth < 0 || nth >= static_cast<std::int64_t>(expected_.size())) return nth;
  const std::int64_t known = expected_[static_cast<std::size_t>(nth)];
  return known == kNever ? nth : known;
}

bool BackwardOrder::comes_before(std::int64_t one, std::int64_t other) const {
  return std::pair(place(one), one) < std::pair(place(other), other);
}

bool BackwardOrder::awaits_one_before(std::int64_t forward) const {
  const auto begun = std::min(places_.size(), expected_.size());
  return std::any_of(expected_.begin() + static_cast<std::ptrdiff_t>(begun), expected_.end(),
                     [&](std::int64_t known) { return known != kNever && known < place(forward); });
}

}  // namespace noria
