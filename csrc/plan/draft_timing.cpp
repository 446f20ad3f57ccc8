#include "plan/draft_timing.h"

namespace noria {

void DraftTiming::begin_backward(const std::vector<Visit>* expected) {
  landed_.fill(Bytes{});
  note_last_visits(expected, &Visit::gradients, last_gradient_);
}

bool DraftTiming::note_drained(UnitId unit, Bytes bytes, std::int64_t position, std::optional<Bytes> awaited) {
  landed_[unit] += bytes;
  return position >= last_gradient_[unit] && (!awaited || landed_[unit] == *awaited);
}

}  // namespace noria
