#include "store/gradient_ring.h"

#include <algorithm>
#include <iterator>

#include "base/errors.h"

namespace noria {

std::optional<Bytes> GradientRing::take(Bytes bytes) {
  std::optional<Bytes> found = free_from(next_, bytes);
  if (!found) found = free_from(Bytes{0}, bytes);
  if (!found) return std::nullopt;
  taken_.emplace(*found, *found + bytes);
  next_ = *found + bytes;
  return found;
}

std::optional<Bytes> GradientRing::free_from(Bytes from, Bytes bytes) const {
  auto next = taken_.upper_bound(from);
  Bytes start = from;
  if (next != taken_.begin()) start = std::max(start, std::prev(next)->second);
  for (; next != taken_.end() && start + bytes > next->first; ++next) start = next->second;
  if (start + bytes > bytes_) return std::nullopt;
  return start;
}

void GradientRing::release(Bytes offset) {
  const auto erased = taken_.erase(offset);
  NORIA_INVARIANT(erased == 1, "a range of the gradient ring is given back that was not taken");
}

}  // namespace noria
