#include "streams.h"

#include <c10/util/Exception.h>

#include <array>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "faults.h"
#include "settings.h"

namespace pretend_gpu {
namespace {

constexpr int kPoolSize = 32;

/// Ids are 0 for a device's default stream, odd for streams of its pools, and an address, which is even, for others'.
struct Pool {
  std::array<cudaStream_t, 2 * kPoolSize> streams{};  // low priority, then high
  std::array<int, 2> next{};
};

struct State {
  std::mutex mutex;
  std::array<Pool, fake_cuda::kNumDevices> pools;
  std::string failure;
};

State& state() {
  static State* the_state = new State;  // streams' threads may outlive static objects
  return *the_state;
}

thread_local std::array<c10::StreamId, fake_cuda::kNumDevices> current_ids{};

c10::Stream stream_of(int device, c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device_of(device), id); }

int index_or_current(int device) { return device < 0 ? current_device() : device; }

cudaStream_t native_of_pool(int device, std::size_t index) {
  const OnDevice on(device);
  State& s = state();
  const std::lock_guard lock(s.mutex);
  cudaStream_t& stream = s.pools.at(static_cast<std::size_t>(device)).streams.at(index);
  if (stream == nullptr) stream = fake_cuda::make_stream();
  return stream;
}

}  // namespace

int current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

void set_device(int device) { check(cudaSetDevice(device), "cudaSetDevice"); }

OnDevice::OnDevice(int device) : device_(device) {
  cudaGetDevice(&before_);
  if (before_ != device_) cudaSetDevice(device_);
}

OnDevice::~OnDevice() {
  if (before_ != device_) cudaSetDevice(before_);
}

c10::Stream default_stream(int device) { return stream_of(index_or_current(device), 0); }

c10::Stream current_stream(int device) {
  device = index_or_current(device);
  return stream_of(device, current_ids.at(static_cast<std::size_t>(device)));
}

c10::Stream set_current_stream(c10::Stream stream) {
  const c10::Stream before = current_stream(stream.device_index());
  current_ids.at(static_cast<std::size_t>(stream.device_index())) = stream.id();
  return before;
}

c10::Stream pool_stream(int device, int priority) {
  device = index_or_current(device);
  const std::size_t rank = priority < 0 ? 1 : 0;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  int& next = s.pools.at(static_cast<std::size_t>(device)).next.at(rank);
  const auto index = rank * kPoolSize + static_cast<std::size_t>(next);
  next = (next + 1) % kPoolSize;
  return stream_of(device, static_cast<c10::StreamId>(2 * index + 1));
}

c10::Stream external_stream(std::uintptr_t handle, int device) {
  return stream_of(index_or_current(device), static_cast<c10::StreamId>(handle));
}

cudaStream_t native(const c10::Stream& stream) {
  const c10::StreamId id = stream.id();
  if (id == 0) return nullptr;
  if (id % 2 == 0) return reinterpret_cast<cudaStream_t>(static_cast<std::uintptr_t>(id));
  return native_of_pool(stream.device_index(), static_cast<std::size_t>(id / 2));
}

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  std::string failure;
  {
    const std::lock_guard lock(state().mutex);
    failure = state().failure;
  }
  // Laxer than CUDA, where such an error stays for good: the next test goes on. The text stays, for other threads that
  // hear of it now.
  fake_cuda::clear_sticky_error(error);
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, error,
                              c10::str("CUDA error: ", cudaGetErrorString(error), " (", cudaGetErrorName(error), " by ",
                                       call, ")",
                                       failure.empty() ? "" : "\nThe last failure on a device was: ", failure));
}

void record_failure(const std::string& text, cudaError_t error) {
  {
    const std::lock_guard lock(state().mutex);
    state().failure = text;
  }
  fake_cuda::set_sticky_error(error);
}

bool has_failed() {
  const std::lock_guard lock(state().mutex);
  return !state().failure.empty();
}

void forget_failure() {
  const std::lock_guard lock(state().mutex);
  state().failure.clear();
  fake_cuda::set_sticky_error(cudaSuccess);
}

std::string reason_of(const std::exception& error) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  return torchs == nullptr ? error.what() : torchs->what_without_backtrace();
}

void run_on(const c10::Stream& stream, const char* name, std::function<void()> work) {
  const OnDevice on(stream.device_index());
  const cudaError_t error = fake_cuda::run_on(native(stream), [name, work = std::move(work)]() mutable {
    fake_cuda::doing(name);
    try {
      work();
    } catch (const std::exception& error) {
      record_failure(c10::str(name, " failed on the device: ", reason_of(error)), cudaErrorAssert);
    }
    work = nullptr;
    fake_cuda::doing(nullptr);
  });
  check(error, name);
}

void launch_on(const c10::Stream& stream, const std::string& name, std::function<void()> work) {
  run_on(stream, name.c_str(), [work = std::move(work)] {
    const struct Finished {
      ~Finished() { launches().finished(); }
    } finished;
    work();
  });
  launches().launched(name);  // after: who waits for a slot of the queue has not launched yet
}

void run_for_free_on(const c10::Stream& stream, std::function<void()> work) {
  const OnDevice on(stream.device_index());
  fake_cuda::run_for_free_on(native(stream), std::move(work));
}

void synchronize(const c10::Stream& stream) {
  const OnDevice on(stream.device_index());
  check(cudaStreamSynchronize(native(stream)), "cudaStreamSynchronize");
}

void synchronize_device(int device) {
  const OnDevice on(index_or_current(device));
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

bool is_idle(const c10::Stream& stream) {
  const OnDevice on(stream.device_index());
  const cudaError_t error = cudaStreamQuery(native(stream));
  if (error != cudaErrorNotReady) check(error, "cudaStreamQuery");
  else (void)cudaGetLastError();
  return error == cudaSuccess;
}

cudaEvent_t make_event(int device, bool has_timing) {
  const OnDevice on(device);
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, has_timing ? 0 : cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return event;
}

void record_event(cudaEvent_t event, const c10::Stream& stream) {
  const OnDevice on(stream.device_index());
  check(cudaEventRecord(event, native(stream)), "cudaEventRecord");
}

void wait_event(cudaEvent_t event, const c10::Stream& stream) {
  const OnDevice on(stream.device_index());
  check(cudaStreamWaitEvent(native(stream), event, 0), "cudaStreamWaitEvent");
}

bool has_passed(cudaEvent_t event) {
  const cudaError_t error = cudaEventQuery(event);
  if (error != cudaErrorNotReady) check(error, "cudaEventQuery");
  else (void)cudaGetLastError();
  return error == cudaSuccess;
}

void announce_wait() {
  const int mode = settings().sync_debug_mode;
  if (mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
  TORCH_CHECK(mode != 2, "called a synchronizing CUDA operation");
}

}  // namespace pretend_gpu
