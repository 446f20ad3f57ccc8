// torch's caching allocator for the memory of the pretend devices, by the rules of torch's own.
//
// Units: bytes. Requests are rounded up to 512; segments of 2 MiB hold small blocks (to 1 MiB), of 20 MiB larger ones,
//   and what is larger than 10 MiB has its own. The smallest idle block that is large enough, of the same stream, is
//   taken, and split.
// Order: memory that is freed is given out again at once on its stream, and (`poison`) overwritten with 0xFF in that
//   stream's order: who uses it still, is seen. Another stream has to be told of (`recordStream`): then memory comes
//   back when that stream has passed the point of the release.
// Ownership: memory that others allocated is not followed. Where the device has no more, what is cached is given back
//   to it, and it is asked once more. Threads: any.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>
#include <functional>
#include <memory>

#include "streams.h"

namespace pretend_gpu {

class Allocator final : public c10::DeviceAllocator {
 public:
  Allocator();
  ~Allocator() override;

  c10::DataPtr allocate(std::size_t num_bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override;

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool = {0, 0}) override;
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override;

  /// At most this fraction of the device's memory is taken.
  void set_fraction(int device, double fraction);
  double fraction(int device) const;

  /// Called with device, bytes asked for, bytes that the allocator has and bytes that the device has free, before an
  /// operator that finds no memory raises; under no lock. For good, as torch's.
  using FullObserver = std::function<void(int, std::size_t, std::size_t, std::size_t)>;
  void tell_when_full(FullObserver observer);

  class Device;

 private:
  Device& of(int device) const;

  std::unique_ptr<Device> devices_[fake_cuda::kNumDevices];
};

Allocator& allocator();

}  // namespace pretend_gpu
