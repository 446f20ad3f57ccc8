#include "bindings/module_visits.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace noria {

HookId ModuleVisits::add_hook(std::string name, std::vector<UnitId> needs) {
  std::sort(needs.begin(), needs.end());
  hooks_.push_back({std::move(name), std::move(needs), 0, false});
  return HookId(static_cast<std::int32_t>(hooks_.size()) - 1);
}

// ---- forward ----------------------------------------------------------------------------------------------------

void ModuleVisits::begin_forward(std::int32_t root, bool training, bool grad_enabled) {
  upward_.before_forward(grad_enabled);
  storages_.raise_late_writes(/*waits=*/false);
  first_alone_ = HookId();
  entered_.clear();
  Signature signature;
  signature.phase = Phase::forward;
  signature.root = root;
  alone_ = root < 0;
  signature.training = training;
  signature.grad_enabled = grad_enabled;
  forward_ = signature;
  saved_.forget_dropped(parts_.engine);  // of a forward that had no backward
  parts_.engine.begin_pass(signature, parts_.current_stream());
  storages_.tell_pass(!alone_);
}

void ModuleVisits::end_forward(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad() && output.grad_fn()) hook_backward(output, events_, -1, /*inner=*/false);
  }
  entered_.clear();
  if (parts_.engine.phase() == Phase::forward) parts_.engine.end_pass(parts_.current_stream());
  storages_.tell_pass(false);
  storages_.raise_lost_writes();
}

void ModuleVisits::enter(HookId id) {
  storages_.raise_lost_writes();
  hook_of(id).sequence = at::sequence_number::peek();
  if (in_backward()) {
    upward_.arm();  // a recomputation
  } else if (!parts_.engine.phase() || (entered_.empty() && id == first_alone_)) {
    // A part of the model is called by itself. That is a pass of its own. It lasts until the same part is called again,
    // or a whole model is.
    const bool with_grad = at::GradMode::is_enabled();
    begin_forward(-1, /*training=*/with_grad, with_grad);
    first_alone_ = id;
  }
  entered_.push_back(id);
  announce_forward(id);
}

void ModuleVisits::leave(HookId id, const std::vector<at::Tensor>& outputs) {
  hook_outputs(id, outputs, /*inner=*/false);
  // A recomputation may have stopped early and left modules entered. Those inside this one are gone too.
  const auto found = std::find(entered_.rbegin(), entered_.rend(), id);
  if (found != entered_.rend()) entered_.erase(std::prev(found.base()), entered_.end());
  if (!entered_.empty()) {
    announce_forward(entered_.back());
  } else if (!in_backward()) {
    parts_.engine.leave(parts_.current_stream());
  }
  storages_.raise_lost_writes();
}

void ModuleVisits::inner_outputs(HookId id, const std::vector<at::Tensor>& outputs) {
  hook_outputs(id, outputs, /*inner=*/true);
}

void ModuleVisits::visit_for_operator(HookId id) {
  hook_of(id).sequence = at::sequence_number::peek();
  if (!in_backward()) {
    if (forward_.grad_enabled && !at::GradMode::is_enabled()) {
      in_functions_.insert(hook_of(id).needs.begin(), hook_of(id).needs.end());
    }
    return announce(id, Phase::forward);
  }
  upward_.arm();
  announce(id, Phase::backward, /*recomputes=*/at::GradMode::is_enabled());
}

void ModuleVisits::visit_for_gradient(UnitId unit) {
  if (parts_.engine.is_visited({}) || !in_functions_.contains(unit)) return;
  if (!for_gradients_.valid()) for_gradients_ = add_hook("gradients", {});
  announce(for_gradients_, Phase::backward);
}

void ModuleVisits::hook_outputs(HookId id, const std::vector<at::Tensor>& outputs, bool inner) {
  if (!at::GradMode::is_enabled()) return;
  const std::uint64_t sequence = hook_of(id).sequence;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    // A node older than this forward belongs to another unit: the module only passed the output through.
    const auto announce_by = [&](const at::Tensor& tensor) {
      const auto& node = tensor.grad_fn();
      if (node && node->sequence_nr() >= sequence) hook_backward(tensor, events_, id.value, inner);
    };
    announce_by(output);
    // An operator that changes a view in place bypasses the view's own node. It uses the node of the view's base.
    if (output.is_view()) announce_by(at::Tensor(output._base()));
  }
}

// Called in a forward, also in one inside a backward (a recomputation).
void ModuleVisits::announce_forward(HookId id) {
  const bool recomputes = in_backward();
  announce(id, recomputes ? Phase::backward : Phase::forward, recomputes);
}

void ModuleVisits::announce(HookId id, Phase phase, bool recomputes) {
  const Hook& hook = hook_of(id);
  storages_.check(hook.needs);
  saved_.forget_dropped(parts_.engine);  // leftovers of the last visit must not block this one
  if (!rest_.is_on()) return parts_.engine.announce(id, hook.needs, phase, parts_.current_stream(), recomputes);
  parts_.engine.announce(id, rest_.streaming(hook.needs), phase, parts_.current_stream(), recomputes);
}

// ---- backward ---------------------------------------------------------------------------------------------------

bool ModuleVisits::is_announced_by(HookId outer, HookId inner) const {
  if (!outer.valid() || !inner.valid() || outer == inner) return false;
  const auto& outer_needs = hook_of(outer).needs;
  const auto& inner_needs = hook_of(inner).needs;
  return !std::includes(outer_needs.begin(), outer_needs.end(), inner_needs.begin(), inner_needs.end());
}

void ModuleVisits::announce_backward(HookId id, bool inner) {
  Hook& hook = hook_of(id);
  hook.inner_was_first |= inner && !parts_.engine.is_visited(rest_.streaming(hook.needs));
  announce(id, Phase::backward);
}

void ModuleVisits::begin_backward() {
  if (parts_.engine.phase() == Phase::forward && !entered_.empty()) interrupted_ = forward_;
  alone_ = false;
}

void ModuleVisits::end_backward() {
  if (!interrupted_) entered_.clear();
}

void ModuleVisits::resume_forward() {
  const auto forward = std::exchange(interrupted_, std::nullopt);
  if (!forward) return;
  Signature rest = *forward;  // torch.autograd.grad ran inside a module
  if (rest.root >= 0) rest.root = -2 - rest.root;
  parts_.engine.begin_pass(rest, parts_.current_stream());
  storages_.tell_pass(forward->root >= 0);
  announce(entered_.back(), Phase::forward);
}

void ModuleVisits::forget() {
  entered_.clear();
  interrupted_.reset();
}

void ModuleVisits::end_lone_pass() {
  if (parts_.engine.phase() && alone_ && entered_.empty()) parts_.engine.end_pass(parts_.current_stream());
}

}  // namespace noria
