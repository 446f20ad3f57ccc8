// The memory of the fake devices, and the host memory that they reach.
//
// All memory of a device is one file without a name (memfd), which other processes can open. Protected, it is mapped
// twice: at the addresses that everybody sees, which cannot be touched, and at others, which only the threads of
// streams use (`reach`). So a host that reads or writes device memory dies of it, as it would on a GPU: see faults.h.
// Unprotected there is one mapping, and the host may look in.
//
// Ownership: what was allocated is mapped until it is freed; only that can be reached. Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <shared_mutex>

#include "cuda_runtime_api.h"
#include "fake_cuda.h"

namespace fake_cuda {

class Memory {
 public:
  /// Before the first allocation.
  void protect();
  bool is_protected() const { return is_protected_; }

  void set_capacity(int device, std::size_t num_bytes);
  std::size_t capacity(int device) const;
  std::size_t used(int device) const;

  cudaError_t allocate(int device, std::size_t size, void** memory);
  /// The device must be idle.
  cudaError_t free(void* memory);
  /// Of memory that begins so.
  std::optional<int> device_of(void* memory) const;
  cudaError_t tell(void* memory, cudaIpcMemHandle_t& handle) const;
  cudaError_t open(int device, const cudaIpcMemHandle_t& handle, void** memory);
  cudaError_t close(int device, void* memory);

  cudaError_t add_registered(int device, void* memory, std::size_t size);
  cudaError_t remove_registered(void* memory);
  void forget_registered();

  Place locate(const void* memory, std::size_t size) const;
  void* reach(const void* memory, std::size_t size) const;

  std::int64_t num_allocations() const;
  std::int64_t num_registered() const;
  std::int64_t num_opened() const;

  /// Writes to `fd` what lies at this address; for the handler of a fault, which must not wait.
  bool describe(int fd, const void* address) const;

 private:
  struct Range {
    std::size_t size;
    int device;
    std::ptrdiff_t to_own = 0;  // from the address that everybody sees to the one that streams use
  };
  using Ranges = std::map<const std::byte*, Range>;
  struct Opened {
    cudaIpcMemHandle_t handle;
    int times;
  };
  /// All memory of a device.
  struct Block {
    int fd = -1;
    std::byte* seen = nullptr;
    std::byte* own = nullptr;
    std::size_t capacity = kDeviceMemory, used = 0;
  };

  static const std::pair<const std::byte* const, Range>* holder(const Ranges& ranges, const void* memory,
                                                                std::size_t size);
  Block& mapped(int device);
  std::byte* gap(int device, std::size_t size);

  bool is_protected_ = false;
  mutable std::shared_mutex mutex_;  // protects all below
  Block blocks_[kNumDevices];
  Ranges allocated_, registered_, opened_ranges_;
  std::map<const std::byte*, Opened> opened_;
};

Memory& memory();

}  // namespace fake_cuda
