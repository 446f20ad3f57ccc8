// BackwardClaims checks, under update="backward", that each update inside a backward is claimed by one `step`, and that
// each gradient is used once.
//
// Example: a second backward without a `step` between raises, because the first one has updated already.
// Ownership: borrows the bridge's parts and the gradient views.
// Threads: as TorchBridge's hooks.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bridge_parts.h"
#include "bindings/gradient_views.h"

namespace noria {

class BackwardClaims {
 public:
  BackwardClaims(const BridgeParts& parts, GradientViews& views) : parts_(parts), views_(views) {}

  /// Sets what is called when an outermost backward begins that will update.
  void set_callback(std::function<void()> begin) { begin_ = std::move(begin); }
  /// If set, passes only accumulate: they make no updates.
  void set_accumulating(bool accumulating);
  /// As Drafts::set_last_of. While units are told, passes need no `step` between them.
  void set_last_of(const std::optional<std::vector<UnitId>>& units);

  /// Raises UsageError if a forward must not begin before a `step`.
  void before_forward() const;
  /// Called before a backward has changed anything. Raises UsageError if it must not begin.
  void before_backward();
  void refuse_unclaimed(const std::string& found) const;
  bool is_held_back(int index) const;
  /// Runs the updates of `step` after passes that have only accumulated. It uses the gradients that the user has not
  /// cleared since.
  void update_held();

 private:
  const BridgeParts& parts_;
  GradientViews& views_;
  std::function<void()> begin_;
  bool accumulates_ = false;
  bool is_told_ = false;       // units are told: engine/drafts.h, Note [Last gradients]
  bool are_any_last_ = false;  // at least one
};

}  // namespace noria
