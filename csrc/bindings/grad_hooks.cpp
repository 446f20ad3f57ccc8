#include "bindings/grad_hooks.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>

#include "bindings/python_errors.h"
#include "bindings/torch_bridge.h"

namespace noria {
namespace {

using torch::autograd::variable_list;
using TorchBridgeRef = std::shared_ptr<TorchBridge*>;  // null after the TorchBridge has closed

struct BackwardBegins final : torch::autograd::FunctionPreHook {
  BackwardBegins(TorchBridgeRef bridge, int hook, bool inner) : bridge(std::move(bridge)), hook(hook), inner(inner) {}
  variable_list operator()(const variable_list& gradients) override {
    if (*bridge != nullptr) as_python_errors([&] { (*bridge)->backward_begins(HookId(hook), inner); });
    return gradients;
  }
  TorchBridgeRef bridge;
  int hook;
  bool inner;
};

struct CatchGradient final : torch::autograd::FunctionPreHook {
  CatchGradient(TorchBridgeRef bridge, int index) : bridge(std::move(bridge)), index(index) {}
  variable_list operator()(const variable_list& gradients) override {
    if (*bridge == nullptr) return gradients;
    variable_list kept;
    as_python_errors([&] { kept = (*bridge)->catch_gradient(index, gradients); });
    return kept;
  }
  TorchBridgeRef bridge;
  int index;
};

struct AfterAccumulate final : torch::autograd::FunctionPostHook {
  AfterAccumulate(TorchBridgeRef bridge, int index) : bridge(std::move(bridge)), index(index) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (*bridge != nullptr) as_python_errors([&] { (*bridge)->after_accumulate(index); });
    return outputs;
  }
  TorchBridgeRef bridge;
  int index;
};

/// Returns true if the hook belongs to a TorchBridge that has closed.
template <class Caught, class Hook>
bool is_left_behind(const std::unique_ptr<Hook>& hook) {
  const auto* ours = dynamic_cast<const Caught*>(hook.get());
  return ours != nullptr && *ours->bridge == nullptr;
}

}  // namespace

void hook_backward(const at::Tensor& output, const TorchBridgeRef& bridge, int hook, bool inner) {
  // A module inside this one may have made the node and hooked it.
  for (const auto& known : output.grad_fn()->pre_hooks()) {
    const auto* earlier = dynamic_cast<const BackwardBegins*>(known.get());
    if (earlier == nullptr || earlier->bridge != bridge || *bridge == nullptr) continue;
    if ((*bridge)->is_announced_by(HookId(hook), HookId(earlier->hook))) return;
  }
  output.grad_fn()->add_pre_hook(std::make_unique<BackwardBegins>(bridge, hook, inner));
}

void hook_accumulator(torch::autograd::Node& accumulator, const TorchBridgeRef& bridge, int index) {
  // If the user keeps a loss, the node stays, with the hooks of earlier wrap calls: one more after each wrap.
  std::erase_if(accumulator.pre_hooks(), [](const auto& each) { return is_left_behind<CatchGradient>(each); });
  std::erase_if(accumulator.post_hooks(), [](const auto& each) { return is_left_behind<AfterAccumulate>(each); });
  accumulator.add_pre_hook(std::make_unique<CatchGradient>(bridge, index));
  accumulator.add_post_hook(std::make_unique<AfterAccumulate>(bridge, index));
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
