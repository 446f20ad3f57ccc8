// Returns the compiled code of kernels/update.cu for GPUs. A build without nvcc has none.
//
// Each image is a fatbin: machine code for the architectures in CMakeLists.txt, and PTX for later ones.
#pragma once

#include <span>

#include "device/cuda_runtime.h"

namespace noria {

/// Returns all images; none if the build had no nvcc. They live as long as the process.
std::span<const void* const> kernel_images();

}  // namespace noria
