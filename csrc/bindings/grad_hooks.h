// Makes the autograd hooks: each turns one event into one call of TorchBridge.
//
// Hooks are C++ objects on autograd nodes, so they take no GIL and nothing is traced. They share a pointer to the
// TorchBridge, which the bridge clears when it closes, because a graph may outlive it.
#pragma once

#include <memory>

#include "bindings/torch_compat.h"

namespace noria {

class TorchBridge;

/// Announces the backward of `hook` before the node runs.
void hook_backward(const at::Tensor& output, const std::shared_ptr<TorchBridge*>& bridge, int hook, bool inner);

/// Catches the gradients of a parameter, before and after AccumulateGrad. Removes hooks of a TorchBridge that has
/// closed.
void hook_accumulator(torch::autograd::Node& accumulator, const std::shared_ptr<TorchBridge*>& bridge, int index);
/// Returns true if other code has hooks on the node. They would see nothing, because gradients are caught before
/// AccumulateGrad.
bool has_foreign_hooks(torch::autograd::Node& accumulator);

}  // namespace noria
