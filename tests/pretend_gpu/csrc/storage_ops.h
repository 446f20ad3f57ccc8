// Operators that make, resize and share storages; no kernels.
#pragma once

#include <ATen/core/Tensor.h>

namespace pretend_gpu {

/// At least so many bytes, which keep what they held, in the order of the current stream.
void grow(c10::StorageImpl& storage, std::size_t num_bytes);
/// Exactly so many, as UntypedStorage.resize_ of CUDA.
void resize_storage(c10::StorageImpl& storage, std::size_t num_bytes);

}  // namespace pretend_gpu
