// torch's streams and devices on the fake CUDA runtime (tests/csrc/device/fake_cuda), which noria's own backend uses
// too.
//
// Ownership: streams of the pools live as long as the process, 32 for each device and priority, given out in turn, as
//   torch's do; a stream that other code made is wrapped, and stays its own. Order: a stream's own; the device that is
//   current and the streams that are current belong to the calling thread. Threads: any.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <string>

#include "fake_cuda.h"

namespace pretend_gpu {

inline constexpr c10::DeviceType kDevice = c10::DeviceType::CUDA;
inline constexpr c10::DispatchKey kKey = c10::DispatchKey::CUDA;

inline c10::Device device_of(int index) { return {kDevice, static_cast<c10::DeviceIndex>(index)}; }

int current_device();
void set_device(int device);

c10::Stream default_stream(int device);
/// Negative: the current device, as in all of these.
c10::Stream current_stream(int device);
/// The one before.
c10::Stream set_current_stream(c10::Stream stream);
c10::Stream pool_stream(int device, int priority);
c10::Stream external_stream(std::uintptr_t handle, int device);
/// Null for the default stream, as with torch's CUDA.
cudaStream_t native(const c10::Stream& stream);

/// The device that is current where CUDA looks at it, put back after.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0, device_;
};

/// Raises what torch raises for this error, and what went wrong on a device if that is why.
void check(cudaError_t error, const char* call);

/// Runs on the stream's thread after all that is queued there. What it throws is a failure of the device: raised where
/// the host next waits. `name`: for reports; it must live on.
void run_on(const c10::Stream& stream, const char* name, std::function<void()> work);
/// The same, counted as a launch of an operator.
void launch_on(const c10::Stream& stream, const std::string& name, std::function<void()> work);
/// Without taking a slot of the launch queue.
void run_for_free_on(const c10::Stream& stream, std::function<void()> work);

void synchronize(const c10::Stream& stream);
void synchronize_device(int device);
bool is_idle(const c10::Stream& stream);
/// Whether something has failed since `forget_failure`.
bool has_failed();
void forget_failure();
void record_failure(const std::string& text, cudaError_t error);
/// Without the way there through torch.
std::string reason_of(const std::exception& error);

cudaEvent_t make_event(int device, bool has_timing = false);
void record_event(cudaEvent_t event, const c10::Stream& stream);
void wait_event(cudaEvent_t event, const c10::Stream& stream);
bool has_passed(cudaEvent_t event);

/// As torch.cuda.set_sync_debug_mode wants it: before the host waits for a device because of what an operator needs.
void announce_wait();

}  // namespace pretend_gpu
