// DeviceOptimizer updates units whose weights, state and gradients lie on the device.
//
// Units: counts are in elements; addresses are device addresses.
// Ownership: shares the backend. The caller keeps what jobs point to until the stream has finished the work of the
//   call. On the host backend a call returns when the work is done.
// Order: work runs in stream order.
// Threads: one call at a time.
//
// The formulas are those of the host's pool (optim/host_optimizer.h). Tests on the CPU find equal bits.
#pragma once

#include <memory>
#include <vector>

#include "device/backend.h"
#include "optim/update.h"

namespace noria {

class DeviceOptimizer {
 public:
  DeviceOptimizer() = default;
  virtual ~DeviceOptimizer() = default;
  DeviceOptimizer(const DeviceOptimizer&) = delete;  // may own threads
  DeviceOptimizer& operator=(const DeviceOptimizer&) = delete;

  /// Runs updates. Throws InvariantError for a malformed job, or one of another kind, before it starts any.
  virtual void update(const std::vector<UpdateJob>& jobs, Stream stream) = 0;
  /// Writes the sum of squares of chunk i to `sums[kSumSpan * i]`. Chunks are numbered through all jobs, in the order
  /// of `cut_into_chunks`. `sums` has room for kSumSpan doubles a chunk; the others are scratch.
  virtual void sum(const std::vector<UpdateJob>& jobs, double* sums, Stream stream) = 0;
};

/// On the host backend all threads of the process share the work. Elsewhere kernels do it; see Backend::kernels_absent.
std::unique_ptr<DeviceOptimizer> make_device_optimizer(std::shared_ptr<Backend> backend);

}  // namespace noria
