#include "plan/draft_timing.h"

namespace noria {

void DraftTiming::begin_backward(const std::vector<Visit>* expected) {
  landed_.fill(Bytes{});
  last_gradient_.fill(-1);
  if (expected == nullptr) return;
  std::int64_t index = 0;
  for (const Visit& visit : *expected) {
    for (UnitId unit : visit.gradients) last_gradient_[unit] = index;
    ++index;
  }
}

bool DraftTiming::note_drained(UnitId unit, Bytes bytes, std::int64_t position, std::optional<Bytes> awaited) {
  landed_[unit] += bytes;
  return position >= last_gradient_[unit] && (!awaited || landed_[unit] == *awaited);
}

}  // namespace noria
