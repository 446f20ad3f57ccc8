// What torch asks of a device type: the guard that changes devices, streams and events, and the hooks of CUDA.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "allocator.h"
#include "generator.h"
#include "pinned.h"
#include "streams.h"

namespace pretend_gpu {
namespace {

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const int before = current_device();
    if (device.index() >= 0 && device.index() != before) set_device(device.index());
    return device_of(before);
  }
  c10::Device getDevice() const override { return device_of(current_device()); }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) set_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) cudaSetDevice(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return fake_cuda::kNumDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(device.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high_priority) const override {
    return pool_stream(device.index(), is_high_priority ? -1 : 0);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return pool_stream(device.index(), priority);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return set_current_stream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return native(stream); }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    announce_wait();
    synchronize(stream);
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    const OnDevice on(stream.device_index());
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(native(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    announce_wait();
    synchronize_device(device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = make_event(stream.device_index(), flag == c10::EventFlag::BACKEND_DEFAULT);
    record_event(static_cast<cudaEvent_t>(*event), stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait_event(static_cast<cudaEvent_t>(event), stream);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || has_passed(static_cast<cudaEvent_t>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) check(cudaEventSynchronize(static_cast<cudaEvent_t>(event)), "cudaEventSynchronize");
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(start), static_cast<cudaEvent_t>(end)),
          "cudaEventElapsedTime");
    return milliseconds;
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    allocator().recordStream(memory, stream);
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

class Hooks final : public at::CUDAHooksInterface {
 public:
  explicit Hooks(at::CUDAHooksArgs) {}

  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  std::string showConfig() const override { return "a pretend GPU"; }
  long versionCUDART() const override { return 13000; }

  c10::DeviceIndex deviceCount() const override { return fake_cuda::kNumDevices; }
  int getNumGPUs() const override { return fake_cuda::kNumDevices; }
  c10::DeviceIndex current_device() const override {
    return static_cast<c10::DeviceIndex>(pretend_gpu::current_device());
  }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = current_device();
    if (device >= 0) set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(c10::DeviceIndex device) const override { synchronize_device(device); }

  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator(); }
  at::Device getDeviceFromPtr(void* memory) const override {
    const fake_cuda::Place place = fake_cuda::locate(memory, 1);
    TORCH_CHECK(place.kind != fake_cuda::Place::Kind::unknown,
                "The specified pointer resides on host memory and is not registered with any CUDA device.");
    return device_of(place.device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
};

}  // namespace
}  // namespace pretend_gpu

namespace at {
using pretend_gpu::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}  // namespace at
