// A tensor as a kernel knows it: an address, geometry and a type, of the moment of the launch. It keeps no tensor
// alive, so memory that is given back too early, or moved, is really used by others when the kernel comes to run.
//
// Ownership: of device memory none; of a CPU scalar, which CUDA passes by value, a copy. Order: `operand_of` asks the
// storage for its pointer, as the launch of a kernel does, so that evicted storages raise and write call-backs fire
// then. Threads: made by who launches, used by the stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace pretend_gpu {

enum class Access {
  read,
  write,
  write_as_const,  // the pointer is asked for as a const one, and written nevertheless: CUDA's multi-tensor kernels
};

struct Operand {
  bool is_defined = false;
  bool is_wrapped_number = false;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<std::int64_t> sizes, strides;
  std::int64_t offset = 0;        // in its storage
  std::byte* data = nullptr;      // of its first element, as everybody sees it; null if it has none
  std::size_t extent = 0;         // in bytes, from the first element to the end of the last one
  const void* storage = nullptr;  // tensors of one storage stay so
  std::size_t storage_bytes = 0;
  at::Tensor value;  // of a CPU tensor: a copy of this moment

  bool is_on_host() const { return value.defined(); }
};

Operand operand_of(const at::Tensor& tensor, Access access);

/// Raises as a GPU would fault, if a kernel of this device cannot reach the operand's memory. Returns true if it is
/// host memory, reached over the link. `peers`: memory of other devices is fine, as for copies.
bool check_reachable(const Operand& operand, int device, const std::string& kernel, bool peers = false);

/// CPU tensors over the memory of operands, for the kernel that runs on a stream; those of one storage share one.
class Aliases {
 public:
  at::Tensor of(const Operand& operand);

 private:
  std::map<std::pair<const void*, void*>, c10::Storage> storages_;
};

/// A CPU tensor of the same geometry, filled with `value`.
at::Tensor dummy_of(const Operand& operand, int value);

/// For the kernels of a stream: torch's intra-op threads are a thread's own.
void use_threads();

}  // namespace pretend_gpu
