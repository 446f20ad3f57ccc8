// The parts of the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace pretend_gpu {

/// What tests/pretend_gpu/torch_cuda.py makes torch.cuda of.
void bind_cuda(pybind11::module_& m);
/// ProcessGroupNCCL, when torch.distributed is there.
void bind_nccl(pybind11::module_& m);

}  // namespace pretend_gpu
