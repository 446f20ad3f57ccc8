#include "store/gradient_ring.h"

#include <algorithm>

#include "base/errors.h"

namespace noria {

std::optional<int> GradientRing::take(const std::function<bool(int)>& is_read) {
  if (free_.empty()) return std::nullopt;
  auto chosen = std::find_if(free_.begin(), free_.end(), is_read);
  if (chosen == free_.end()) --chosen;
  const int slot = *chosen;
  free_.erase(chosen);
  is_taken_[static_cast<std::size_t>(slot)] = true;
  return slot;
}

void GradientRing::release(int slot) {
  const bool was_taken = is_taken_.at(static_cast<std::size_t>(slot));
  NORIA_INVARIANT(was_taken, "a slot of the gradient ring is given back that was not taken");
  is_taken_[static_cast<std::size_t>(slot)] = false;
  free_.push_back(slot);
}

}  // namespace noria
