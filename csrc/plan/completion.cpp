#include "plan/completion.h"

#include <algorithm>
#include <utility>

namespace noria {

void Completion::begin_backward(const std::vector<Visit>* expected) {
  note_last_visits(expected, &Visit::needs, last_visit_);
}

void Completion::expect(UnitId unit) {
  const int made = std::exchange(made_[unit], 0);
  left_[unit] = made > 0 ? std::optional(made) : std::nullopt;
}

void Completion::note_backward(UnitId unit, bool completes) {
  if (!completes) made_[unit] = std::max(made_[unit] - 1, 0);
  else if (left_[unit]) --*left_[unit];
}

bool Completion::is_complete(UnitId unit, std::int64_t position) const {
  const bool is_foreseen = last_visit_[unit] >= 0;
  const bool is_known = left_[unit] || is_foreseen;
  return is_known && left_[unit].value_or(0) <= 0 && position >= last_visit_[unit];
}

}  // namespace noria
