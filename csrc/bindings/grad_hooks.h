// Makes the autograd hooks: each turns one event into one call of AutogradEvents.
//
// Hooks are C++ objects on autograd nodes, so they take no GIL. They share a pointer to the AutogradEvents.
// TorchBridge clears the pointer when it closes, because a graph may outlive it.
#pragma once

#include <memory>

#include "base/ids.h"
#include "bindings/torch_compat.h"

namespace noria {

/// Hooks on autograd nodes call AutogradEvents when a backward begins and when a gradient comes.
class AutogradEvents {
 public:
  virtual ~AutogradEvents() = default;

  /// The backward of a visit begins. `hook` -1: the outermost module's output. `inner`: an output of a module inside
  /// the hook's module announces it.
  virtual void backward_begins(HookId hook, bool inner) = 0;
  /// Returns what AccumulateGrad gets.
  virtual torch::autograd::variable_list catch_gradient(int index, const torch::autograd::variable_list& gradients) = 0;
  virtual void after_accumulate(int index) = 0;
  /// Returns true if `inner` needs a unit that `outer` lacks. Then `outer` does not hook a node that `inner` has
  /// hooked.
  virtual bool is_announced_by(HookId outer, HookId inner) const = 0;
};

using AutogradEventsRef = std::shared_ptr<AutogradEvents*>;  // null after the TorchBridge has closed

/// Returns true on a thread that is in a backward.
bool in_backward();

/// Announces the backward of `hook` before the node runs.
void hook_backward(const at::Tensor& output, const AutogradEventsRef& events, int hook, bool inner);

/// Catches the gradients of a parameter, before and after AccumulateGrad. Removes hooks of a TorchBridge that has
/// closed.
void hook_accumulator(torch::autograd::Node& accumulator, const AutogradEventsRef& events, int index);
/// Returns true if other code has hooks on the node. They would see nothing, because gradients are caught before
/// AccumulateGrad.
bool has_foreign_hooks(torch::autograd::Node& accumulator);

}  // namespace noria
