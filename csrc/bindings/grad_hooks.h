// The autograd hooks: each translates one event into one call of Custody.
//
// Hooks are C++ objects on autograd nodes, so no GIL is taken and nothing is traced. They share a pointer to the
// Custody that is emptied when it closes: a graph may outlive it.
#pragma once

#include <memory>

#include "bindings/torch_compat.h"

namespace noria {

class Custody;

/// Announces the backward of `hook` before the node runs.
void hook_backward(const at::Tensor& output, const std::shared_ptr<Custody*>& custody, int hook, bool inner);

/// Catches the gradients of a parameter, before and after AccumulateGrad. Hooks of a Custody that has closed go.
void hook_accumulator(torch::autograd::Node& accumulator, const std::shared_ptr<Custody*>& custody, int index);
/// Somebody else has hooks on it, which would see nothing: gradients are caught before AccumulateGrad.
bool has_foreign_hooks(torch::autograd::Node& accumulator);

}  // namespace noria
