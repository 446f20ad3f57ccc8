#include "bindings/backwards.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "base/errors.h"
#include "bindings/python_errors.h"

namespace noria {

using torch::autograd::variable_list;

void Backwards::before_forward(bool grad_enabled) {
  owners_.home.refuse_open();
  parts_.refuse_capture();
  forget_failed();
  trains_ = std::this_thread::get_id();
  owners_.claims.before_forward();
  // Makes the nodes here, on the training stream, so that autograd finds producer and consumer on one stream.
  if (grad_enabled) owners_.catcher.make_accumulators(events_, owners_.rest);
}

// ---- a backward begins ------------------------------------------------------------------------------------------

void Backwards::backward_begins(HookId hook, bool inner) {
  if (owners_.rest.is_whole()) return;
  if (at::GradMode::is_enabled()) {
    throw UsageError("backward() without create_graph",
                     "create_graph=True, whose second backward would need weights that have left the device",
                     "compute higher derivatives on an unwrapped model");
  }
  owners_.storages.raise_lost_writes();
  arm();
  if (hook.valid()) owners_.visits.announce_backward(hook, inner);
}

variable_list Backwards::catch_gradient(int index, const variable_list& gradients) {
  const UnitId unit = parts_.parameters[index].unit;
  if (owners_.rest.has(unit) || !owners_.catcher.is_wanted(index, gradients)) return gradients;
  arm();
  owners_.visits.visit_for_gradient(unit);
  return owners_.catcher.take(index, gradients);
}

void Backwards::arm() {
  const int task = torch::autograd::get_current_graph_task_id();
  for (const Armed& each : armed_) {
    if (each.task == task) return;
  }
  parts_.refuse_other_process();
  owners_.home.refuse_open();
  owners_.catcher.refuse_captured();
  forget_failed();
  const auto token = std::make_shared<std::promise<void>>();  // never set: only its destruction counts
  armed_.push_back({task, token->get_future().share()});
  torch::autograd::Engine::get_default_engine().queue_callback([this, events = events_, task, token] {
    if (*events != nullptr) as_python_errors([&] { task_ended(task); });
  });
  if (parts_.engine.phase() != Phase::backward) begin();
}

void Backwards::begin() {
  owners_.visits.begin_backward();
  Signature signature;
  signature.phase = Phase::backward;
  signature.forward = parts_.engine.last_forward();
  if (parts_.updates_in_backward) owners_.claims.before_backward();
  else if (parts_.is_shared) owners_.views.drop_cleared();
  if (parts_.is_shared) {
    owners_.audit.note_sums();
    owners_.views.multiply_parts();
  }
  for (int index = 0; index < parts_.parameters.size() && !signature.accumulating; ++index) {
    signature.accumulating = owners_.views.is(index) == GradientIs::held;
  }
  parts_.engine.begin_pass(signature, parts_.current_stream());
  owners_.storages.tell_pass(true);
  owners_.views.begin_backward(parts_.engine.drafts()->expects_step());
  // If this backward raises, drains may still be on their way when the user edits held gradients.
  if (signature.accumulating && parts_.shows_gradients()) owners_.views.guard();
}

// ---- a backward ends --------------------------------------------------------------------------------------------

void Backwards::task_ended(int task) {
  std::erase_if(armed_, [&](const Armed& each) { return each.task == task; });
  const bool nested = static_cast<bool>(torch::autograd::get_current_node());
  if (nested && !armed_.empty()) return;
  armed_.clear();
  try {
    finish();
  } catch (...) {  // a drain has failed, for example, or ranks have parted
    try {
      reset();
    } catch (...) {  // NOLINT(bugprone-empty-catch): the first failure is the one to tell
    }
    throw;
  }
  owners_.storages.raise_lost_writes();
}

void Backwards::finish() {
  owners_.visits.end_backward();
  if (parts_.is_shared && !unsynced_) {
    parts_.engine.end_reductions(parts_.current_stream());
    share_arrivals();
  }
  owners_.saved.forget_dropped(parts_.engine);
  parts_.engine.end_pass(parts_.current_stream());
  owners_.storages.tell_pass(false);
  for (const int index : owners_.catcher.take_arrived()) owners_.views.show(index);
  owners_.visits.resume_forward();
}

// A gradient that arrived on any rank counts as arrived on all ranks, also if its backward was not synced.
void Backwards::share_arrivals() {
  ParameterSet arrived = owners_.catcher.arrived();
  for (int index = 0; index < parts_.parameters.size(); ++index) {
    if (!parts_.parameters[index].facts.may_have_gradient() || owners_.views.is(index) != GradientIs::held) continue;
    arrived.add(static_cast<std::size_t>(index));
  }
  const auto came = owners_.catcher.note_arrived(owners_.audit.share_arrivals(std::move(arrived)));
  if (parts_.updates_in_backward) parts_.engine.backward_updates()->note_arrived(came);
}

void Backwards::set_unsynced(bool unsynced) {
  unsynced_ = unsynced;
  parts_.engine.set_unsynced(unsynced);
}

// ---- a pass raises ----------------------------------------------------------------------------------------------

void Backwards::recover() {
  await_failed();
  if (parts_.engine.phase() == Phase::backward) reset();
}

void Backwards::abandon_forward() {
  if (parts_.engine.phase() == Phase::forward) reset();
  owners_.storages.tell_pass(false);
}

// If the training thread has left a backward that has not ended, that backward raised. A thread of autograd's may still
// be in one of its nodes, and noria's hooks are on them.
void Backwards::await_failed() {
  if (in_backward() || std::this_thread::get_id() != trains_) return;
  const std::vector<Armed> begun = armed_;  // a backward of another thread may end without having raised
  for (const Armed& each : begun) each.over.wait();
}

void Backwards::forget_failed() {
  await_failed();
  const auto is_over = [](const Armed& each) {
    return each.over.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  };
  if (std::any_of(armed_.begin(), armed_.end(), is_over)) reset();
}

void Backwards::reset() {
  armed_.clear();
  owners_.visits.forget();
  owners_.catcher.forget();
  parts_.engine.reset(parts_.current_stream());
  owners_.storages.tell_pass(false);
}

}  // namespace noria
