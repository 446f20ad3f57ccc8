// The autograd hooks: each translates one event into one call of Custody.
//
// Hooks are C++ objects on autograd nodes, so no GIL is taken and nothing is traced. They hold Custody weakly by raw
// pointer: nodes of a wrapped model die before its Custody, or are cut by `Custody::close`.
#pragma once

#include <memory>

#include "bindings/torch_compat.h"

namespace noria {

class Custody;

/// Announces the backward of `hook` before the node runs.
void hook_backward(const at::Tensor& output, const std::shared_ptr<Custody*>& custody, int hook, bool inner);

/// Catches the gradients of a parameter, before and after AccumulateGrad.
void hook_accumulator(torch::autograd::Node& accumulator, const std::shared_ptr<Custody*>& custody, int index);

}  // namespace noria
