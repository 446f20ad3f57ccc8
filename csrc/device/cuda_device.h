// One device, and the CUDA runtime that reaches it: every failed call becomes a MachineError that names it.
//
// Ownership: shares the runtime. Threads: any.
//
// Note [Pending errors]. A failed runtime call also leaves its error behind for the next caller of cudaGetLastError,
// which would be torch, in a place that has nothing to do with us. Every failure here takes its error away again.
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

  /// Throws unless `error` is success; `bytes`: what the call was about.
  void check(cuda::Error error, const char* call, Bytes bytes = {}) const;
  [[noreturn]] void fail(cuda::Error error, const std::string& call) const;
  /// Takes a failure away, for who has looked at it already.
  void forget_error() const { (void)runtime_->GetLastError(); }

  /// For threads of ours: on this device, and beside all captures (Note [Captures]), for good.
  void use_on_own_thread() const;

 private:
  const std::shared_ptr<const cuda::Runtime> runtime_;
  const int index_;
};

/// While it lives, the calling thread is on this device, and its calls do not disturb a capture of CUDA graphs that
/// another thread makes. For threads of others: both are put back after.
///
/// Note [Captures]. While any thread captures in mode "global" (the default of torch.cuda.graph), calls such as
/// cudaEventQuery or cudaMalloc by other threads are refused, and break the capture. A thread that has set its own mode
/// to "relaxed" may make them: none of noria's calls has to do with what is captured.
class OnDevice {
 public:
  explicit OnDevice(const CudaDevice& device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;  // puts back once
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const CudaDevice& device_;
  int previous_ = 0;
  bool is_changed_ = false;
  cuda::CaptureMode mode_ = cuda::kCaptureRelaxed;
};

}  // namespace noria
