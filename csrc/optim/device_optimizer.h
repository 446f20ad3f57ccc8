// DeviceOptimizer updates units whose weights, state and gradients lie on the device.
//
// Ownership: jobs point to memory of the device, which the caller keeps until a call returns.
// Order: a call comes after all that the device does for these gradients, and returns when its work is done.
// Threads: one call at a time. The bits are those of the host's pool (optim/host_optimizer.h).
#pragma once

#include <memory>
#include <vector>

#include "optim/update.h"

namespace noria {

class DeviceOptimizer {
 public:
  DeviceOptimizer() = default;
  virtual ~DeviceOptimizer() = default;
  DeviceOptimizer(const DeviceOptimizer&) = delete;  // owns threads, or kernels
  DeviceOptimizer& operator=(const DeviceOptimizer&) = delete;

  /// Every job is an update. Throws InvariantError for a malformed one, before any has begun.
  virtual void update(const std::vector<UpdateJob>& jobs) = 0;
  /// Returns the sums of squares by job and piece.
  virtual std::vector<std::vector<double>> sums(const std::vector<UpdateJob>& jobs) = 0;
};

/// The device is the host: all threads of the process update, for the calling thread waits.
std::unique_ptr<DeviceOptimizer> make_host_device_optimizer();

}  // namespace noria
