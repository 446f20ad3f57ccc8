#include "bindings/gradient_catcher.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "base/errors.h"

namespace noria {

using torch::autograd::variable_list;

void GradientCatcher::bind(const UnitMap<BridgedUnit>& units) {
  buffers_ = UnitMap(std::vector<std::unique_ptr<UnitStorage>>(units.size()));
  caught_.resize(static_cast<std::size_t>(parts_.parameters.size()));
  for (const UnitId unit : parts_.parameters.units()) {
    const Bytes bytes = units[unit].engine.facts.gradients;
    if (bytes == Bytes{0}) continue;
    auto& buffer = buffers_[unit];
    buffer = std::make_unique<UnitStorage>(bytes.count, parts_.device,
                                           "gradient buffer of " + parts_.parameters.unit_name(unit) + " is closed");
    for (const int index : parts_.parameters.of(unit)) {
      const Parameter& each = parts_.parameters[index];
      if (!each.facts.may_have_gradient()) continue;
      caught(index).buffer = buffer->view(each.facts.dtype, each.facts.gradient_offset, each.sizes, each.strides);
    }
  }
}

void GradientCatcher::make_accumulators(const AutogradEventsRef& events, const Rest& rest) {
  const Stream stream = parts_.current_stream();
  // A node waits at every gradient for the stream that it was made on, and torch warns. So a new stream needs new
  // nodes.
  const bool is_elsewhere = std::exchange(accumulators_stream_, stream) != stream;
  for (int index = 0; index < parts_.parameters.size(); ++index) {
    const BridgedParameter& facts = parts_.parameters[index].facts;
    if (!facts.may_have_gradient() || !facts.variable.requires_grad()) continue;
    if (rest.has(parts_.parameters[index].unit)) continue;
    NodePtr& accumulator = caught(index).accumulator;
    if (is_elsewhere) accumulator.reset();
    NodePtr node = torch::autograd::impl::grad_accumulator(facts.variable);
    if (node == accumulator) continue;  // else: new, or torch made another after a change of dtype
    hook_accumulator(*node, events, index);
    accumulator = std::move(node);
    refuse_foreign_hooks(index);
  }
}

void GradientCatcher::refuse_foreign_hooks(int index) const {
  if (!has_foreign_hooks(*caught(index).accumulator)) return;
  throw UsageError("no hooks on the AccumulateGrad node of \"" + parts_.parameters[index].facts.name + "\" but noria's",
                   "others, as DistributedDataParallel and its kin register them",
                   "use parameter.register_hook or register_post_accumulate_grad_hook; wrap the model itself and not "
                   "under DistributedDataParallel");
}

void GradientCatcher::drop_accumulators(const std::vector<UnitId>& units) {
  for (const UnitId unit : units) {
    for (const int index : parts_.parameters.of(unit)) caught(index).accumulator.reset();
  }
}

void GradientCatcher::refuse_captured() const {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr || wanted->empty()) return;
  for (int index = 0; index < parts_.parameters.size(); ++index) {
    const NodePtr& accumulator = caught(index).accumulator;
    if (!accumulator) continue;
    const auto found = wanted->find(&*accumulator);
    if (found == wanted->end() || !found->second.captures_ || found->second.captures_->empty()) continue;
    throw UsageError("gradients of wrapped parameters by loss.backward()",
                     "torch.autograd.grad with respect to \"" + parts_.parameters[index].facts.name + "\"",
                     "call loss.backward() and read p.grad, or unwrap the model first");
  }
}

bool GradientCatcher::has(const c10::Storage& storage) const {
  for (const UnitId unit : buffers_.ids()) {
    if (buffers_[unit] && buffers_[unit]->is(storage)) return true;
  }
  return false;
}

// ---- a gradient -------------------------------------------------------------------------------------------------

bool GradientCatcher::is_wanted(int index, const variable_list& gradients) const {
  return gradients[0].defined() && parts_.parameters[index].facts.variable.requires_grad();
}

variable_list GradientCatcher::take(int index, const variable_list& gradients) {
  const Parameter& into = parts_.parameters[index];
  refuse_foreign_hooks(index);
  if (torch::autograd::impl::post_acc_grad_hooks(into.facts.variable)) {
    if (views_.is(index) == GradientIs::foreign) return gradients;
    caught(index).take_after = true;
    if (views_.is(index) == GradientIs::none || parts_.is_shared) {
      into.facts.variable.mutable_grad().reset();
      return gradients;
    }
    parts_.engine.expect_gradient(into.unit, parts_.current_stream());  // its visit waits for the held gradient
    const at::NoGradGuard no_grad;
    at::Tensor sum = (is_brought(index) ? caught(index).buffer : views_.held(index).inner()).clone();
    views_.held(index).scale(sum);
    into.facts.variable.mutable_grad().reset();
    return {sum.add_(gradients[0])};
  }
  if (views_.is(index) == GradientIs::foreign) return gradients;
  write(index, gradients[0]);
  return {at::Tensor()};
}

void GradientCatcher::after_accumulate(int index) {
  if (!std::exchange(caught(index).take_after, false)) return;
  const at::Tensor gradient = std::exchange(parts_.parameters[index].facts.variable.mutable_grad(), at::Tensor());
  if (gradient.defined()) write(index, gradient);  // undefined: the user's hook has used it up
}

void GradientCatcher::write(int index, const at::Tensor& gradient) {
  const Parameter& into = parts_.parameters[index];
  Caught& written = caught(index);
  if (gradient.layout() != at::kStrided || gradient.scalar_type() != into.facts.dtype) {
    throw UsageError("a dense gradient of \"" + into.facts.name + "\" in its own dtype",
                     gradient.layout() != at::kStrided ? "a sparse one" : c10::toString(gradient.scalar_type()),
                     "use dense embeddings (sparse=False) and leave grad_dtype alone");
  }
  parts_.engine.expect_gradient(into.unit, parts_.current_stream());
  const at::NoGradGuard no_grad;
  if (written.written) {
    written.buffer.add_(gradient);
  } else if (adds_to_held(index)) {
    if (!is_brought(index)) written.buffer.copy_(views_.held(index).inner(), /*non_blocking=*/true);
    views_.held(index).scale(written.buffer);
    written.buffer.add_(gradient);
  } else {
    views_.held(index).reuse(into.facts.variable.grad());
    written.buffer.copy_(gradient, /*non_blocking=*/true);
  }
  written.written = written.arrived = true;
  views_.arrived(index, written.buffer);
  parts_.engine.gradient_arrived(into.unit, into.facts.gradient_begin(), into.facts.bytes());
}

bool GradientCatcher::adds_to_held(int index) const {
  const Parameter& into = parts_.parameters[index];
  if (!parts_.is_shared) return caught(index).arrived || views_.is(index) == GradientIs::held;
  return parts_.engine.is_unreduced(into.unit, into.facts.gradient_begin(), into.facts.bytes());
}

bool GradientCatcher::is_brought(int index) const {
  const Parameter& into = parts_.parameters[index];
  if (views_.has_held(index) && !views_.held(index).is_private()) return false;  // a write may be unheard
  return parts_.engine.is_brought(into.unit, into.facts.gradient_begin(), into.facts.bytes());
}

Ranges GradientCatcher::held_gradients(UnitId unit) const {
  Ranges ranges;
  for (const int index : parts_.parameters.of(unit)) {
    if (!views_.has_held(index) || !adds_to_held(index) || !views_.held(index).is_private()) continue;
    const BridgedParameter& facts = parts_.parameters[index].facts;
    ranges.add(facts.gradient_begin(), facts.gradient_begin() + facts.bytes());
  }
  return ranges;
}

// ---- buffers ----------------------------------------------------------------------------------------------------

void GradientCatcher::open(UnitId unit, std::byte* buffer) {
  buffers_[unit]->attach(buffer);
  for (const int index : parts_.parameters.of(unit)) caught(index).written = false;
}

void GradientCatcher::close(UnitId unit, bool is_drained) {
  buffers_[unit]->evict();
  for (const int index : parts_.parameters.of(unit)) {
    // The drained bytes have been multiplied by these scales already.
    if (is_drained && caught(index).written) views_.held(index).drop_scales();
  }
  // The loop may see this gradient in p.grad already, and it may be drafted before the backward ends. If a hook of the
  // user's writes it, noria hears of that from here on.
  if (parts_.shows_gradients()) views_.guard(unit);
}

// ---- what has arrived -------------------------------------------------------------------------------------------

ParameterSet GradientCatcher::arrived() const {
  ParameterSet arrived(caught_.size());
  for (std::size_t i = 0; i < caught_.size(); ++i) {
    if (caught_[i].arrived) arrived.add(i);
  }
  return arrived;
}

std::map<UnitId, std::set<Bytes>> GradientCatcher::note_arrived(const ParameterSet& arrived) {
  std::map<UnitId, std::set<Bytes>> came;
  for (int index = 0; index < parts_.parameters.size(); ++index) {
    Caught& each = caught(index);
    each.arrived = each.arrived || arrived.contains(static_cast<std::size_t>(index));
    const Parameter& into = parts_.parameters[index];
    if (each.arrived && into.facts.variable.numel() > 0) came[into.unit].insert(into.facts.gradient_begin());
  }
  return came;
}

std::vector<int> GradientCatcher::take_arrived() {
  std::vector<int> taken;
  for (int index = 0; index < parts_.parameters.size(); ++index) {
    if (std::exchange(caught(index).arrived, false)) taken.push_back(index);
  }
  return taken;
}

void GradientCatcher::forget() {
  for (Caught& each : caught_) each.written = each.arrived = each.take_after = false;
}

}  // namespace noria
