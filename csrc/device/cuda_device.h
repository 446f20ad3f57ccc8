// CudaDevice names one device and the CUDA runtime that reaches it. `check` turns a failed call into a MachineError.
//
// Ownership: shares the runtime.
// Threads: any.
//
// Note [Pending errors]. A failed runtime call also leaves its error behind for the next caller of cudaGetLastError.
// That would be torch, in unrelated code. So after every failure here noria clears the error.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "device/cuda_runtime.h"

namespace noria {

class CudaDevice {
 public:
  CudaDevice(std::shared_ptr<const cuda::Runtime> runtime, int index) : runtime_(std::move(runtime)), index_(index) {}

  const cuda::Runtime* operator->() const { return runtime_.get(); }
  int index() const { return index_; }
  std::string name() const { return "cuda:" + std::to_string(index_); }

  /// Throws MachineError unless `error` is success. `bytes`: the size that the call was about.
  void check(cuda::Error error, const char* call, Bytes bytes = {}) const;
  [[noreturn]] void fail(cuda::Error error, const std::string& call) const;
  /// Clears the error of a failed call that the caller has handled itself.
  void forget_error() const { (void)runtime_->GetLastError(); }

  /// Sets the device for good on one of noria's own threads, whose calls then disturb no capture (Note [Captures]).
  void use_on_own_thread() const;

 private:
  const std::shared_ptr<const cuda::Runtime> runtime_;
  const int index_;
};

/// While it lives, puts the calling thread on this device, and keeps its calls from disturbing another thread's capture
/// of a CUDA graph. The destructor restores both settings; see Note [Contexts] for noria's own threads.
///
/// Note [Captures]. While any thread captures in mode "global" (the default of torch.cuda.graph), CUDA refuses calls
/// such as cudaEventQuery or cudaMalloc by other threads. Such calls also break the capture. A thread that has set its
/// own mode to "relaxed" may make them. This is safe, because none of noria's calls touches what is captured.
///
/// Note [Contexts]. Setting a device makes its context, which takes half a GiB there. A thread begins on device 0. On
/// noria's own threads the destructor leaves the device as it is: to set it back to 0 would make a context there.
class OnDevice {
 public:
  explicit OnDevice(const CudaDevice& device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;  // restores once
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const CudaDevice& device_;
  int previous_ = 0;
  bool is_changed_ = false;
  cuda::CaptureMode mode_ = cuda::kCaptureRelaxed;
};

}  // namespace noria
