// ByteSums tells if bytes on a device have changed, without a copy of them and without a wait for the device.
//
// The bytes are taken as 64-bit words in rows of a prime length, and each column is summed. One change changes a sum.
// So do two words that change places, unless they are a multiple of the prime apart.
//
// Threads: the thread that launches kernels. All runs on its current stream.
#pragma once

#include <ATen/core/Tensor.h>

namespace noria {

struct ByteSums {
  at::Tensor columns;
  at::Tensor rest;  // a copy of what is behind the last whole row
};

/// Sums a tensor of bytes. Its address is a multiple of 8.
ByteSums sums_of(const at::Tensor& bytes);

/// Returns a bool on the device.
at::Tensor differ(const ByteSums& a, const ByteSums& b);

}  // namespace noria
