// Answers operators on listened tensors from what their listener knows, without reading or writing the memory.
//
// Example: a norm of `p.grad` that was taken while the gradient was still in device memory. The bits are those of
// torch's operator. If a listener does not answer for all tensors of a list, torch's operator runs for the others.
//
// Threads: any; the operator's own.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKey.h>

#include <memory>

#include "bindings/listening.h"

namespace noria {

/// Marks tensors from which noria hears every operator: see Note [Keys] in listening.cpp.
inline constexpr c10::DispatchKey kHearsAll = c10::DispatchKey::DeferredInit;

/// Names a tensor's listener, and its number there. No listener: noria does not listen to the tensor.
struct Heard {
  std::shared_ptr<Listener> listener;
  int number = 0;
};
Heard heard(const at::Tensor& tensor);

/// Does what the operator does and returns true, with the result on the stack. Returns false, with the stack as it was,
/// if the operator must run.
using Answer = bool (*)(const c10::OperatorHandle&, torch::jit::Stack&);

/// Returns the answer to this operator; nullptr if there is none.
Answer answer_of(const c10::OperatorHandle& op);

}  // namespace noria
