// The kernel of every operator on the pretend GPU that has none of its own.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>

#include "call.h"

namespace pretend_gpu {

/// Boxed. Takes the call apart, makes its outputs, and queues the CPU kernel on the current stream; or, where the
/// result depends on values, waits for the stream and calls it here.
void launch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

/// Whether CUDA has one launch for these lists of tensors, and not one for each tensor: torch's own conditions.
bool takes_fast_route(const c10::OperatorHandle& op, const Stack& stack);

}  // namespace pretend_gpu
