#include "bindings/grad_hooks.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "bindings/python_errors.h"

namespace noria {
namespace {

using torch::autograd::variable_list;

struct BackwardBegins final : torch::autograd::FunctionPreHook {
  BackwardBegins(AutogradEventsRef events, int hook, bool inner)
      : events(std::move(events)),
        hook(hook),
        inner(inner) {}
  variable_list operator()(const variable_list& gradients) override {
    if (*events != nullptr) as_python_errors([&] { (*events)->backward_begins(HookId(hook), inner); });
    return gradients;
  }
  AutogradEventsRef events;
  int hook;
  bool inner;
};

struct CatchGradient final : torch::autograd::FunctionPreHook {
  CatchGradient(AutogradEventsRef events, int index) : events(std::move(events)), index(index) {}
  variable_list operator()(const variable_list& gradients) override {
    if (*events == nullptr) return gradients;
    variable_list kept;
    as_python_errors([&] { kept = (*events)->catch_gradient(index, gradients); });
    return kept;
  }
  AutogradEventsRef events;
  int index;
};

struct AfterAccumulate final : torch::autograd::FunctionPostHook {
  AfterAccumulate(AutogradEventsRef events, int index) : events(std::move(events)), index(index) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (*events != nullptr) as_python_errors([&] { (*events)->after_accumulate(index); });
    return outputs;
  }
  AutogradEventsRef events;
  int index;
};

/// Returns true if the hook belongs to a TorchBridge that has closed.
template <class Caught, class Hook>
bool is_left_behind(const std::unique_ptr<Hook>& hook) {
  const auto* ours = dynamic_cast<const Caught*>(hook.get());
  return ours != nullptr && *ours->events == nullptr;
}

}  // namespace

bool in_backward() { return torch::autograd::get_current_graph_task_id() >= 0; }

void hook_backward(const at::Tensor& output, const AutogradEventsRef& events, int hook, bool inner) {
  // A module inside this one may have made the node and hooked it.
  for (const auto& known : output.grad_fn()->pre_hooks()) {
    const auto* earlier = dynamic_cast<const BackwardBegins*>(known.get());
    if (earlier == nullptr || earlier->events != events || *events == nullptr) continue;
    if ((*events)->is_announced_by(HookId(hook), HookId(earlier->hook))) return;
  }
  output.grad_fn()->add_pre_hook(std::make_unique<BackwardBegins>(events, hook, inner));
}

void hook_accumulator(torch::autograd::Node& accumulator, const AutogradEventsRef& events, int index) {
  // If the user keeps a loss, the node stays, with the hooks of earlier wrap calls: one more after each wrap.
  std::erase_if(accumulator.pre_hooks(), [](const auto& each) { return is_left_behind<CatchGradient>(each); });
  std::erase_if(accumulator.post_hooks(), [](const auto& each) { return is_left_behind<AfterAccumulate>(each); });
  accumulator.add_pre_hook(std::make_unique<CatchGradient>(events, index));
  accumulator.add_post_hook(std::make_unique<AfterAccumulate>(events, index));
}

bool has_foreign_hooks(torch::autograd::Node& accumulator) {
  if (accumulator.pre_hooks().size() == 1 && accumulator.post_hooks().size() == 1)
    return false;  // the quick case: called at each gradient
  const auto is_foreign_pre = [](const auto& each) {
    return dynamic_cast<const CatchGradient*>(each.get()) == nullptr;
  };
  const auto is_foreign_post = [](const auto& each) {
    return dynamic_cast<const AfterAccumulate*>(each.get()) == nullptr;
  };
  return std::any_of(accumulator.pre_hooks().begin(), accumulator.pre_hooks().end(), is_foreign_pre) ||
         std::any_of(accumulator.post_hooks().begin(), accumulator.post_hooks().end(), is_foreign_post);
}

}  // namespace noria
