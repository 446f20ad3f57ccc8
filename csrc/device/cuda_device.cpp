#include "device/cuda_device.h"

#include "base/errors.h"
#include "device/own_thread.h"

namespace noria {

void CudaDevice::fail(cuda::Error error, const std::string& call) const {
  forget_error();
  throw MachineError(call + " failed: " + runtime_->GetErrorString(error) + " (" + runtime_->GetErrorName(error) + ")");
}

void CudaDevice::check(cuda::Error error, const char* call, Bytes bytes) const {
  if (error == cuda::kSuccess) return;
  const std::string size =
      bytes.count > 0 ? " of " + to_string(bytes) + " (" + std::to_string(bytes.count) + " bytes)" : std::string();
  fail(error, call + size + " on " + name());
}

void CudaDevice::use_on_own_thread() const {
  check(runtime_->SetDevice(index_), "cudaSetDevice");
  cuda::CaptureMode mode = cuda::kCaptureRelaxed;
  check(runtime_->ThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
}

OnDevice::OnDevice(const CudaDevice& device) : device_(device) {
  device_.check(device_->GetDevice(&previous_), "cudaGetDevice");
  if (previous_ != device_.index()) {
    device_.check(device_->SetDevice(device_.index()), "cudaSetDevice");
    is_changed_ = !is_own_thread();
  }
  if (device_->ThreadExchangeStreamCaptureMode(&mode_) == cuda::kSuccess) return;
  device_.forget_error();
  mode_ = cuda::kCaptureRelaxed;
}

OnDevice::~OnDevice() {
  if (mode_ != cuda::kCaptureRelaxed && device_->ThreadExchangeStreamCaptureMode(&mode_) != cuda::kSuccess) {
    device_.forget_error();
  }
  if (is_changed_ && device_->SetDevice(previous_) != cuda::kSuccess) device_.forget_error();
}

}  // namespace noria
