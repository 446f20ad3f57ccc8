#include "bindings/gradient_views.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>

#include <string>

#include "base/errors.h"
#include "bindings/python_errors.h"

namespace noria {
namespace {

constexpr const char* kWhyDead =
    "noria expected no look at p.grad under update=\"backward\", which uses it up or keeps it for step(), but found "
    "one (a clip, a scaler, a logger, zero_grad(set_to_none=False)). Remedy: wrap with update=\"auto\", where p.grad "
    "is as in torch";

constexpr const char* kWhyShared =
    "noria expected no look at p.grad if ranks share the model and each has a part of the sum, but found one (a "
    "logger, an edit, zero_grad(set_to_none=False), a pipeline's scale_grads). Remedy: clip with "
    "optimizer.clip_grad_norm_ or wrap with max_grad_norm; give noria.wrap a pipeline's stage in place of its module, "
    "whose gradients it scales";

constexpr const char* kWhyDeadAndShared =
    "noria expected no look at p.grad under update=\"backward\", which uses it up, if ranks share the model, but "
    "found one (a clip, a scaler, a logger, zero_grad(set_to_none=False)). Remedy: to clip, wrap with update=\"auto\" "
    "and max_grad_norm; to accumulate, use optimizer.accumulate()";

const char* why_unseen(bool is_dead, bool is_shared) {
  if (is_dead && is_shared) return kWhyDeadAndShared;
  return is_shared ? kWhyShared : (is_dead ? kWhyDead : "");
}

}  // namespace

GradientViews::GradientViews(const BridgeParts& parts) : parts_(parts), self_(std::make_shared<GradientViews*>(this)) {
  ShownGradients::Callbacks callbacks;
  callbacks.before_write = [this](int index) { before_write(parts_.parameters[index].unit); };
  callbacks.before_scale = [this](int index) { parts_.engine.run_deferred(parts_.parameters[index].unit); };
  callbacks.is_settled = [this](int index) {
    if (!parts_.is_own_process()) return false;  // a write raises the error
    const Parameter& asked = parts_.parameters[index];
    const bool is_reduced =
        !parts_.is_shared || !parts_.engine.is_unreduced(asked.unit, asked.facts.gradient_begin(), asked.facts.bytes());
    return is_reduced && parts_.engine.phase() != Phase::backward;
  };
  if (parts_.is_shared) {
    callbacks.norms_of_parts = [this](const std::vector<int>& indices, const NormAsked& asked) {
      return rank_parts_.norms ? rank_parts_.norms(indices, asked) : std::vector<at::Tensor>(indices.size());
    };
  }
  shown_ = std::make_shared<ShownGradients>(std::move(callbacks));
}

void GradientViews::bind(const UnitMap<BridgedUnit>& units, const std::shared_ptr<void>& held_home) {
  for (int index = 0; index < parts_.parameters.size(); ++index) {
    const auto& [facts, unit, sizes, strides] = parts_.parameters[index];
    std::unique_ptr<HeldGradient> held;
    if (facts.may_have_gradient()) {
      std::byte* const in_home = units[unit].engine.held;
      const bool is_seen = in_home != nullptr && !parts_.is_shared;
      held = std::make_unique<HeldGradient>(
          is_seen ? parts_.backend.device_address(in_home + facts.gradient_offset) : nullptr, facts.bytes().count,
          parts_.device, facts.variable,
          [self = self_, index, held_home] {
            if (*self == nullptr) return;
            as_python_errors([&] { (*self)->shown_->before_raw_write(index); });
          },
          why_unseen(parts_.updates_in_backward, parts_.is_shared));
    }
    shown_->add(std::move(held));
  }
}

// ---- what p.grad is ---------------------------------------------------------------------------------------------

GradientIs GradientViews::is(int index) const {
  const at::Tensor& gradient = parts_.parameters[index].facts.variable.grad();
  if (!gradient.defined()) return GradientIs::none;
  return has_held(index) && held(index).is(gradient) ? GradientIs::held : GradientIs::foreign;
}

void GradientViews::take_foreign(int index) {
  const Parameter& from = parts_.parameters[index];
  if (parts_.is_shared) refuse_foreign(from);
  parts_.engine.access_held(from.unit, parts_.current_stream());
  const at::NoGradGuard no_grad;
  HeldGradient& taken = held(index);
  shown_->forget(index);
  taken.reuse(from.facts.variable.grad());
  taken.inner().copy_(from.facts.variable.grad());
}

void GradientViews::take_part(int index) {
  const Parameter& taken = parts_.parameters[index];
  parts_.engine.keep_gradient(taken.unit, taken.facts.gradient_begin(), taken.facts.bytes());
  show(index);
}

void GradientViews::refuse_foreign(const Parameter& refused) {
  throw UsageError("no p.grad of the user's own if ranks share the model", "one on \"" + refused.facts.name + "\"",
                   "clear it: every rank updates its part of the gradient that backward() has reduced");
}

void GradientViews::drop_cleared() {
  for (int index = 0; index < parts_.parameters.size(); ++index) {
    const Parameter& each = parts_.parameters[index];
    if (!each.facts.may_have_gradient()) continue;
    const GradientIs shown = is(index);
    if (shown == GradientIs::none) {
      parts_.engine.drop_gradient(each.unit, each.facts.gradient_begin(), each.facts.bytes());
      if (has_held(index)) drop_scales(index);  // of a gradient that is gone
    }
    if (shown != GradientIs::foreign) continue;
    if (parts_.is_shared) refuse_foreign(each);
    throw UsageError("no p.grad of the user's own under update=\"backward\"", "one on \"" + each.facts.name + "\"",
                     "clear it, or wrap with update=\"auto\"");
  }
}

bool GradientViews::is_unreduced(int index) const {
  const Parameter& asked = parts_.parameters[index];
  return parts_.is_shared && asked.facts.may_have_gradient() && is(index) == GradientIs::held &&
         parts_.engine.is_unreduced(asked.unit, asked.facts.gradient_begin(), asked.facts.bytes());
}

void GradientViews::refuse_unreduced() const {
  for (int index = 0; index < parts_.parameters.size(); ++index) {
    if (!is_unreduced(index)) continue;
    throw UsageError("a backward outside of no_sync() before optimizer.step()",
                     "gradients of \"" + parts_.parameters[index].facts.name + "\" that are not reduced over the ranks",
                     "leave no_sync() before the last backward of a step");
  }
}

// ---- a backward -------------------------------------------------------------------------------------------------

void GradientViews::show(int index) {
  at::Tensor& gradient = parts_.parameters[index].facts.variable.mutable_grad();
  if (!gradient.defined()) gradient = held(index).tensor();
  if (parts_.shows_gradients() && is(index) == GradientIs::held) held(index).guard();
}

void GradientViews::multiply_parts() {
  for (int index = 0; index < parts_.parameters.size(); ++index) {
    if (!has_held(index) || held(index).scales().empty() || is(index) != GradientIs::held) continue;
    rank_parts_.multiply(index);
  }
}

// ---- writes -----------------------------------------------------------------------------------------------------

void GradientViews::before_write(UnitId unit) {
  parts_.refuse_other_process();
  parts_.engine.access_held(unit, parts_.current_stream());
}

void GradientViews::guard() {
  if (parts_.is_shared) return;
  for (int index = 0; index < parts_.parameters.size(); ++index) {
    if (has_held(index) && is(index) == GradientIs::held) held(index).guard();
  }
}

void GradientViews::guard(UnitId unit) {
  for (const int index : parts_.parameters.of(unit)) {
    if (is(index) == GradientIs::held) held(index).guard();
  }
}

void GradientViews::held_moved(UnitId unit, std::byte* moved) {
  for (const int index : parts_.parameters.of(unit)) {
    const std::int64_t offset = parts_.parameters[index].facts.gradient_offset;
    if (offset >= 0) held(index).move_to(parts_.backend.device_address(moved + offset));
  }
}

// ---- the step, and factors --------------------------------------------------------------------------------------

void GradientViews::begin_step() {
  std::vector<int> scaled;
  std::vector<UnitId> units;
  for (int index = 0; index < parts_.parameters.size(); ++index) {
    const Parameter& each = parts_.parameters[index];
    if (!has_held(index) || is(index) != GradientIs::held) continue;
    // If something can write the memory unnoticed, the gradient counts as written.
    if (parts_.shows_gradients() && !held(index).is_private()) before_write(each.unit);
    if (held(index).scales().empty() || held(index).are_scales_told() || each.facts.scales == nullptr) continue;
    scaled.push_back(index);
    if (units.empty() || units.back() != each.unit) units.push_back(each.unit);
  }
  parts_.engine.begin_step(parts_.current_stream(), units, [&] { write_scales(scaled); });
  shown_->begin_step();
}

void GradientViews::write_scales(const std::vector<int>& indices) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> to, from;
  for (const int index : indices) {
    HeldGradient& scaled = held(index);
    auto* memory = reinterpret_cast<std::byte*>(parts_.parameters[index].facts.scales);
    for (const Scale& each : scaled.scales()) {
      to.push_back(
          tensor_over(parts_.backend.device_address(memory), sizeof(float), parts_.device, at::kFloat, {}, {}));
      memory += sizeof(float);
      if (each.by == Scale::By::number) {
        to.back().fill_(static_cast<float>(each.number));  // too large a number is infinite, as in torch
        to.pop_back();
      } else {
        from.push_back(each.tensor);
      }
    }
    scaled.tell_scales();
  }
  if (!to.empty()) at::_foreach_copy_(to, from, /*non_blocking=*/true);
}

std::pair<const float*, int> GradientViews::late_scales(int index) const {
  const HeldGradient& scaled = held(index);
  NORIA_INVARIANT(scaled.scales().empty() || scaled.are_scales_told(), "an update lacks what multiplies its gradient");
  return {parts_.parameters[index].facts.scales, static_cast<int>(scaled.scales().size())};
}

std::vector<float> GradientViews::take_scales(int index) {
  const auto [memory, count] = late_scales(index);
  held(index).drop_scales();
  shown_->forget(index);
  return {memory, memory + count};
}

std::vector<float> GradientViews::scale_values(int index) const {
  std::vector<float> values;
  for (const Scale& each : held(index).scales()) {
    values.push_back(each.by == Scale::By::number ? static_cast<float>(each.number) : each.tensor.item<float>());
  }
  return values;
}

void GradientViews::drop_scales(int index) {
  shown_->forget(index);
  held(index).drop_scales();
}

int GradientViews::first_scaled(const std::vector<int>& indices) const {
  at::Tensor one;  // most have the same factor; it is read once
  for (const int index : indices) {
    if (!has_held(index)) continue;
    for (const Scale& each : held(index).scales()) {
      if (each.by == Scale::By::number) {
        if (each.number != 1) return index;
      } else if (!each.tensor.is_same(one)) {
        if (each.tensor.item<float>() != 1) return index;
        one = each.tensor;
      }
    }
  }
  return -1;
}

void GradientViews::unscale_used(const std::vector<int>& indices, const at::Tensor& inverse) {
  const Scale scale = kept({Scale::By::unscaling, inverse, 1});
  for (const int index : indices) {
    if (!shown_->may_multiply(index)) apply_scales(index);
    if (parts_.is_shared || shown_->may_multiply(index)) {
      shown_->multiply(index, scale);
    } else {
      shown_->before_raw_write(index);
      multiply_by(held(index).inner(), scale);
    }
  }
}

bool GradientViews::apply_scales(int index) {
  if (!has_held(index)) return false;
  shown_->forget(index);
  if (held(index).scales().empty()) return false;
  if (parts_.is_shared) {
    rank_parts_.multiply(index);
    return false;
  }
  before_write(parts_.parameters[index].unit);
  shown_->apply_scales(index);
  return parts_.device.is_cuda();
}

}  // namespace noria
