// Names what differs between the torch versions that noria builds against.
#pragma once

#include <torch/csrc/autograd/variable.h>
#include <torch/headeronly/version.h>

#define NORIA_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace noria {

/// Is a shared_ptr before torch 2.13, and an intrusive_ptr since.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

}  // namespace noria
