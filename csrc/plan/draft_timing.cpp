#include "plan/draft_timing.h"

namespace noria {

void DraftTiming::begin_backward(const std::vector<Visit>* expected) {
  landed_.fill(Bytes{});
  note_last_visits(expected, &Visit::gradients, last_gradient_);
  note_last_visits(expected, &Visit::needs, last_need_);
}

bool DraftTiming::note_drained(UnitId unit, Bytes bytes, std::int64_t position, std::optional<Bytes> awaited) {
  landed_[unit] += bytes;
  const bool is_last = position >= last_gradient_[unit] && position >= last_need_[unit];
  return is_last && (!awaited || landed_[unit] == *awaited);
}

}  // namespace noria
