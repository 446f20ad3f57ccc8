#include "bindings/grad_hooks.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>

#include "bindings/custody.h"
#include "bindings/python_errors.h"

namespace noria {
namespace {

using torch::autograd::variable_list;
using CustodyRef = std::shared_ptr<Custody*>;  // emptied when the Custody closes

struct BackwardBegins final : torch::autograd::FunctionPreHook {
  BackwardBegins(CustodyRef custody, int hook, bool inner) : custody(std::move(custody)), hook(hook), inner(inner) {}
  variable_list operator()(const variable_list& gradients) override {
    if (*custody != nullptr) as_python_errors([&] { (*custody)->backward_begins(HookId(hook), inner); });
    return gradients;
  }
  CustodyRef custody;
  int hook;
  bool inner;
};

struct CatchGradient final : torch::autograd::FunctionPreHook {
  CatchGradient(CustodyRef custody, int index) : custody(std::move(custody)), index(index) {}
  variable_list operator()(const variable_list& gradients) override {
    if (*custody == nullptr) return gradients;
    variable_list kept;
    as_python_errors([&] { kept = (*custody)->catch_gradient(index, gradients); });
    return kept;
  }
  CustodyRef custody;
  int index;
};

struct AfterAccumulate final : torch::autograd::FunctionPostHook {
  AfterAccumulate(CustodyRef custody, int index) : custody(std::move(custody)), index(index) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (*custody != nullptr) as_python_errors([&] { (*custody)->after_accumulate(index); });
    return outputs;
  }
  CustodyRef custody;
  int index;
};

/// Of a Custody that has closed.
template <class Caught, class Hook>
bool is_left_behind(const std::unique_ptr<Hook>& hook) {
  const auto* ours = dynamic_cast<const Caught*>(hook.get());
  return ours != nullptr && *ours->custody == nullptr;
}

}  // namespace

void hook_backward(const at::Tensor& output, const CustodyRef& custody, int hook, bool inner) {
  // A module inside of this one may have made the node, and said so.
  for (const auto& known : output.grad_fn()->pre_hooks()) {
    const auto* earlier = dynamic_cast<const BackwardBegins*>(known.get());
    if (earlier == nullptr || earlier->custody != custody || *custody == nullptr) continue;
    if ((*custody)->is_announced_by(HookId(hook), HookId(earlier->hook))) return;
  }
  output.grad_fn()->add_pre_hook(std::make_unique<BackwardBegins>(custody, hook, inner));
}

void hook_accumulator(torch::autograd::Node& accumulator, const CustodyRef& custody, int index) {
  // A loss that was kept keeps the node, and on it the hooks of wrap calls that are over: one more each time.
  std::erase_if(accumulator.pre_hooks(), [](const auto& each) { return is_left_behind<CatchGradient>(each); });
  std::erase_if(accumulator.post_hooks(), [](const auto& each) { return is_left_behind<AfterAccumulate>(each); });
  accumulator.add_pre_hook(std::make_unique<CatchGradient>(custody, index));
  accumulator.add_post_hook(std::make_unique<AfterAccumulate>(custody, index));
}

bool has_foreign_hooks(torch::autograd::Node& accumulator) {
  if (accumulator.pre_hooks().size() == 1 && accumulator.post_hooks().size() == 1)
    return false;  // asked at each gradient
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
