#include "bindings/backward_claims.h"

#include <algorithm>

#include "base/errors.h"

namespace noria {

void BackwardClaims::set_accumulating(bool accumulating) {
  accumulates_ = accumulating;
  parts_.engine.backward_updates()->set_accumulating(accumulating);
}

void BackwardClaims::set_last_of(const std::optional<std::vector<UnitId>>& units) {
  is_told_ = units.has_value();
  are_any_last_ = units && !units->empty();
  parts_.engine.drafts()->set_last_of(units);
}

void BackwardClaims::before_forward() const {
  if (!is_told_) refuse_unclaimed("a forward");
}

void BackwardClaims::before_backward() {
  if (!is_told_) refuse_unclaimed("another backward");
  views_.drop_cleared();
  const std::vector<UnitId> updated = is_told_ ? parts_.engine.unclaimed() : std::vector<UnitId>();  // of other stages
  for (int index = 0; index < parts_.parameters.size(); ++index) {
    if (views_.is(index) != GradientIs::held || is_held_back(index)) continue;
    const Parameter& each = parts_.parameters[index];
    if (std::find(updated.begin(), updated.end(), each.unit) != updated.end()) continue;
    throw UsageError("optimizer.zero_grad() between step() and the next backward()",
                     "the gradient of \"" + each.facts.name + "\", which an update has used up, not cleared",
                     "call zero_grad(), or wrap with update=\"auto\", which accumulates over steps as torch does");
  }
  if (accumulates_ || (is_told_ && !are_any_last_) || !begin_) return;
  parts_.engine.backward_updates()->forget_expected();
  begin_();
}

void BackwardClaims::refuse_unclaimed(const std::string& found) const {
  // Torn units are refused elsewhere, with a reason of their own.
  if (!parts_.updates_in_backward) return;
  const std::vector<UnitId> unclaimed = parts_.engine.unclaimed();
  if (unclaimed.empty() || !parts_.engine.torn().empty()) return;
  const std::string units =
      "\"" + parts_.parameters.unit_name(unclaimed.front()) + "\"" +
      (unclaimed.size() > 1 ? " and " + std::to_string(unclaimed.size() - 1) + " more units" : "");
  throw UsageError("optimizer.step() after each backward() under update=\"backward\", which has updated already",
                   found + " before the step() of the optimizer that holds " + units,
                   "call step() of every optimizer, or put a backward that shall only accumulate inside `with "
                   "optimizer.accumulate():`");
}

bool BackwardClaims::is_held_back(int index) const {
  const Parameter& each = parts_.parameters[index];
  return each.facts.may_have_gradient() && parts_.engine.is_held_back(each.unit, each.facts.gradient_begin());
}

void BackwardClaims::update_held() {
  views_.drop_cleared();
  parts_.engine.update_held(parts_.current_stream());
}

}  // namespace noria
