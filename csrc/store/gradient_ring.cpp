#include "store/gradient_ring.h"

#include "base/errors.h"

namespace noria {

std::optional<int> GradientRing::take() {
  for (std::size_t tried = 0; tried < is_taken_.size(); ++tried) {
    const std::size_t slot = next_;
    next_ = (next_ + 1) % is_taken_.size();
    if (is_taken_[slot]) continue;
    is_taken_[slot] = true;
    return static_cast<int>(slot);
  }
  return std::nullopt;
}

void GradientRing::release(int slot) {
  const bool was_taken = is_taken_.at(static_cast<std::size_t>(slot));
  NORIA_INVARIANT(was_taken, "a slot of the gradient ring is given back that was not taken");
  is_taken_[static_cast<std::size_t>(slot)] = false;
}

}  // namespace noria
