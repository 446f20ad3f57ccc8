#include "fake_cuda.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "memory.h"
#include "stream.h"

using fake_cuda::memory;
using fake_cuda::pace;
using fake_cuda::Place;
using fake_cuda::Record;
using fake_cuda::waits;
using fake_cuda::WorkKind;

struct CUevent_st {
  int device;
  bool has_timing;
  std::shared_ptr<Record> last;  // null: never recorded
};

namespace {

using Stream = std::shared_ptr<CUstream_st>;

struct World {
  std::mutex mutex;  // no thread waits, and no stream's work runs or is destroyed, under it
  std::map<std::string, std::int64_t> counts;
  std::vector<std::string> log;
  struct Injected {
    std::string call;
    int nth;
    cudaError_t error;
  };
  std::vector<Injected> injected;
  std::map<const void*, std::function<void()>> held_copies;
  std::int64_t num_empty_waits = 0;
  cudaError_t sticky = cudaSuccess;
  std::map<cudaStream_t, Stream> streams;
  std::set<cudaEvent_t> events;
  Stream default_stream[fake_cuda::kNumDevices];
  struct Capture {
    cudaStream_t stream;
    bool is_broken = false;
  };
  std::optional<Capture> capture;  // in mode "global"
};

World& world() {
  static World* the_world = new World;  // streams outlive everything that could destroy it
  return *the_world;
}

// What `log` remembers; a process may call for hours.
constexpr std::size_t kLongestLog = 1 << 20;

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

cudaError_t leave(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

/// While a thread captures, calls that could hurt the capture are refused to all threads that have not said "relaxed";
/// such a call breaks the capture.
bool is_unsafe_beside_captures(const char* call) {
  static const std::set<std::string> unsafe = {
      "cudaMalloc",           "cudaFree",          "cudaHostRegister",     "cudaHostUnregister",
      "cudaIpcOpenMemHandle", "cudaEventQuery",    "cudaEventSynchronize", "cudaStreamSynchronize",
      "cudaIpcGetMemHandle",  "cudaStreamDestroy", "cudaStreamQuery",      "cudaDeviceSynchronize"};
  return capture_mode != cudaStreamCaptureModeRelaxed && unsafe.count(call) > 0;
}

/// At once. Calls that wait hear of them after the wait (`outcome`): what was queued before is over then.
bool hears_of_failures(const char* call) {
  static const std::set<std::string> hearing = {"cudaMalloc",      "cudaFree",        "cudaEventQuery",
                                                "cudaStreamQuery", "cudaMemcpyAsync", "cudaMemsetAsync",
                                                "cudaEventRecord"};
  return hearing.count(call) > 0;
}

/// Counts the call; the injected error, if its turn has come.
cudaError_t enter(const char* call) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  ++w.counts[call];
  if (w.log.size() < kLongestLog) w.log.push_back(call);
  if (w.capture && is_unsafe_beside_captures(call)) {
    w.capture->is_broken = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  for (auto it = w.injected.begin(); it != w.injected.end(); ++it) {
    if (it->call != call || --it->nth > 0) continue;
    const cudaError_t error = it->error;
    w.injected.erase(it);
    return error;
  }
  return w.sticky != cudaSuccess && hears_of_failures(call) ? w.sticky : cudaSuccess;
}

/// After a wait: what went wrong on the way.
cudaError_t outcome() {
  std::lock_guard lock(world().mutex);
  return leave(world().sticky);
}

#define ENTER(call)                                                  \
  do {                                                               \
    const cudaError_t injected_error = enter(call);                  \
    if (injected_error != cudaSuccess) return leave(injected_error); \
  } while (false)

/// Null if there is none. Caller holds the world's mutex.
Stream resolve(cudaStream_t stream) {
  World& w = world();
  if (stream != nullptr && stream != cudaStreamLegacy) {
    const auto found = w.streams.find(stream);
    return found == w.streams.end() ? nullptr : found->second;
  }
  Stream& own = w.default_stream[current_device];
  if (own == nullptr) own = CUstream_st::start(current_device);
  return own;
}

Stream find(cudaStream_t stream) {
  std::lock_guard lock(world().mutex);
  return resolve(stream);
}

/// All of a device, or of all devices.
std::vector<Stream> streams_of(std::optional<int> device) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  std::vector<Stream> found;
  for (const Stream& own : w.default_stream) {
    if (own && (!device || own->device() == *device)) found.push_back(own);
  }
  for (const auto& [handle, stream] : w.streams) {
    if (!device || stream->device() == *device) found.push_back(stream);
  }
  return found;
}

void wait_for(CUstream_st& stream, std::uint64_t position) {
  if (stream.wait_until(position)) ++waits().by_host;
}

void wait_for_device(int device) {
  std::vector<std::pair<Stream, std::uint64_t>> ends;
  for (const Stream& stream : streams_of(device)) ends.emplace_back(stream, stream->end());
  bool has_waited = false;
  for (const auto& [stream, end] : ends) has_waited |= stream->wait_until(end);
  if (has_waited) ++waits().by_host;
}

/// The device's own memory, or what was opened on it.
bool on_device(int device, const void* at, std::size_t size) {
  const Place place = memory().locate(at, size);
  return (place.kind == Place::Kind::allocated || place.kind == Place::Kind::opened) && place.device == device;
}

/// For a copy that runs: what it was queued for may be gone by now.
void* reach(const char* call, const void* at, std::size_t size) {
  void* const found = memory().reach(at, size);
  if (found == nullptr) {
    std::fprintf(stderr,
                 "pretend GPU: %s came to %zu bytes at %p, which were freed, closed or unregistered meanwhile\n", call,
                 size, at);
    fake_cuda::set_sticky_error(cudaErrorIllegalAddress);
  }
  return found;
}

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

// ---- control ----

namespace fake_cuda {

void fail_next(const std::string& call, int nth, cudaError_t error) {
  std::lock_guard lock(world().mutex);
  world().injected.push_back({call, nth, error});
}

std::map<std::string, std::int64_t> counts() {
  std::lock_guard lock(world().mutex);
  return world().counts;
}

std::vector<std::string> log() {
  std::lock_guard lock(world().mutex);
  return world().log;
}

void reset() {
  memory().forget_registered();
  std::map<const void*, std::function<void()>> held_copies;
  World& w = world();
  std::lock_guard lock(w.mutex);
  w.counts.clear();
  w.log.clear();
  w.injected.clear();
  w.held_copies.swap(held_copies);
  w.sticky = cudaSuccess;
}

std::int64_t num_empty_waits() {
  std::lock_guard lock(world().mutex);
  return world().num_empty_waits;
}

std::map<std::string, std::int64_t> alive() {
  World& w = world();
  std::lock_guard lock(w.mutex);
  return {{"allocations", memory().num_allocations()},
          {"registrations", memory().num_registered()},
          {"streams", static_cast<std::int64_t>(w.streams.size())},
          {"events", static_cast<std::int64_t>(w.events.size())},
          {"opened", memory().num_opened()}};
}

cudaError_t pending_error() { return last_error; }

cudaStream_t make_stream(bool is_patient) {
  const Stream stream = CUstream_st::start(current_device, is_patient);
  std::lock_guard lock(world().mutex);
  world().streams.emplace(stream.get(), stream);
  return stream.get();
}

void begin_capture(cudaStream_t stream) {
  std::lock_guard lock(world().mutex);
  world().capture = World::Capture{resolve(stream).get()};
}

bool end_capture() {
  std::lock_guard lock(world().mutex);
  const bool is_whole = world().capture && !world().capture->is_broken;
  world().capture.reset();
  return is_whole;
}

void hold_copy(const void* to, std::function<void()> until) {
  std::lock_guard lock(world().mutex);
  world().held_copies[to] = std::move(until);
}

cudaError_t run_on(cudaStream_t stream, std::function<void()> work) {
  const Stream found = find(stream);
  if (found == nullptr) return leave(cudaErrorInvalidResourceHandle);
  found->enqueue(std::move(work), WorkKind::kernel);
  return cudaSuccess;
}

void run_for_free_on(cudaStream_t stream, std::function<void()> work) {
  if (const Stream found = find(stream)) found->enqueue(std::move(work), WorkKind::free);
}

void set_lazy(bool is_lazy) {
  pace().is_lazy = is_lazy;
  for (const Stream& stream : streams_of(std::nullopt)) stream->wake();
}

void set_delays(std::uint64_t seed, std::int64_t max_delay_us, int percent) {
  pace().seed = seed;
  pace().max_delay_us = max_delay_us;
  pace().delayed_percent = percent;
}

void set_observers(std::vector<std::string> names) { pace().set_observers(std::move(names)); }

void stop() {
  pace().is_stopping = true;
  for (const Stream& stream : streams_of(std::nullopt)) stream->await_ended();
}

void protect_memory() { memory().protect(); }
void set_capacity(int device, std::size_t num_bytes) { memory().set_capacity(device, num_bytes); }
Place locate(const void* at, std::size_t size) { return memory().locate(at, size); }
void* reach(const void* at, std::size_t size) { return memory().reach(at, size); }

void set_sticky_error(cudaError_t error) {
  std::lock_guard lock(world().mutex);
  world().sticky = error;
}

void clear_sticky_error(cudaError_t error) {
  std::lock_guard lock(world().mutex);
  if (world().sticky == error) world().sticky = cudaSuccess;
}

std::int64_t num_host_waits() { return waits().by_host; }
std::int64_t num_full_queues() { return waits().full_queue; }

void reset_waits() {
  waits().by_host = 0;
  waits().full_queue = 0;
}

}  // namespace fake_cuda

// ---- the runtime ----

extern "C" {

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
  case cudaSuccess:
    return "cudaSuccess";
  case cudaErrorInvalidValue:
    return "cudaErrorInvalidValue";
  case cudaErrorMemoryAllocation:
    return "cudaErrorMemoryAllocation";
  case cudaErrorInvalidDevice:
    return "cudaErrorInvalidDevice";
  case cudaErrorMapBufferObjectFailed:
    return "cudaErrorMapBufferObjectFailed";
  case cudaErrorInvalidResourceHandle:
    return "cudaErrorInvalidResourceHandle";
  case cudaErrorNotReady:
    return "cudaErrorNotReady";
  case cudaErrorIllegalAddress:
    return "cudaErrorIllegalAddress";
  case cudaErrorAssert:
    return "cudaErrorAssert";
  case cudaErrorHostMemoryAlreadyRegistered:
    return "cudaErrorHostMemoryAlreadyRegistered";
  case cudaErrorHostMemoryNotRegistered:
    return "cudaErrorHostMemoryNotRegistered";
  case cudaErrorStreamCaptureUnsupported:
    return "cudaErrorStreamCaptureUnsupported";
  case cudaErrorStreamCaptureInvalidated:
    return "cudaErrorStreamCaptureInvalidated";
  case cudaErrorUnknown:
    return "cudaErrorUnknown";
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
  case cudaErrorMemoryAllocation:
    return "out of memory";
  case cudaErrorIllegalAddress:
    return "an illegal memory access was encountered";
  case cudaErrorAssert:
    return "device-side assert triggered";
  default:
    return "an error of the fake CUDA runtime";
  }
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  ENTER("cudaRuntimeGetVersion");
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  ENTER("cudaGetDeviceCount");
  *count = fake_cuda::kNumDevices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  ENTER("cudaGetDevice");
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  ENTER("cudaSetDevice");
  if (device < 0 || device >= fake_cuda::kNumDevices) return leave(cudaErrorInvalidDevice);
  current_device = device;
  {
    std::lock_guard lock(world().mutex);
    ++world().counts["cudaSetDevice to " + std::to_string(device)];
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  ENTER("cudaDeviceGetPCIBusId");
  if (device < 0 || device >= fake_cuda::kNumDevices) return leave(cudaErrorInvalidDevice);
  std::snprintf(id, static_cast<std::size_t>(size), "0000:%02X:00.0", 0x3B + device);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  ENTER("cudaDeviceSynchronize");
  wait_for_device(current_device);
  return outcome();
}

cudaError_t cudaMalloc(void** at, std::size_t size) {
  ENTER("cudaMalloc");
  return leave(memory().allocate(current_device, size, at));
}

cudaError_t cudaFree(void* at) {
  ENTER("cudaFree");
  const std::optional<int> device = memory().device_of(at);
  if (!device) return leave(cudaErrorInvalidValue);
  wait_for_device(*device);
  return leave(memory().free(at));
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* at) {
  ENTER("cudaIpcGetMemHandle");
  return leave(memory().tell(at, *handle));
}

cudaError_t cudaIpcOpenMemHandle(void** at, cudaIpcMemHandle_t handle, unsigned int flags) {
  ENTER("cudaIpcOpenMemHandle");
  if (flags != cudaIpcMemLazyEnablePeerAccess) return leave(cudaErrorInvalidValue);
  return leave(memory().open(current_device, handle, at));
}

cudaError_t cudaIpcCloseMemHandle(void* at) {
  ENTER("cudaIpcCloseMemHandle");
  return leave(memory().close(current_device, at));
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  ENTER("cudaMemGetInfo");
  *total = memory().capacity(current_device);
  const std::size_t used = memory().used(current_device);
  *free = used < *total ? *total - used : 0;
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* at, std::size_t size, unsigned int) {
  ENTER("cudaHostRegister");
  return leave(memory().add_registered(current_device, at, size));
}

cudaError_t cudaHostUnregister(void* at) {
  ENTER("cudaHostUnregister");
  return leave(memory().remove_registered(at));
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned int) {
  ENTER("cudaHostGetDevicePointer");
  if (memory().locate(host, 1).kind != Place::Kind::registered) return leave(cudaErrorInvalidValue);
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  ENTER("cudaStreamCreateWithFlags");
  *stream = fake_cuda::make_stream();
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  ENTER("cudaStreamDestroy");
  Stream found;
  {
    std::lock_guard lock(world().mutex);
    const auto it = world().streams.find(stream);
    if (it == world().streams.end()) return leave(cudaErrorInvalidResourceHandle);
    found = std::move(it->second);
    world().streams.erase(it);
  }
  found->close();
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ENTER("cudaStreamSynchronize");
  const Stream found = find(stream);
  if (found == nullptr) return leave(cudaErrorInvalidResourceHandle);
  wait_for(*found, found->end());
  return outcome();
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  ENTER("cudaStreamQuery");
  const Stream found = find(stream);
  if (found == nullptr) return leave(cudaErrorInvalidResourceHandle);
  return found->poll(found->end()) ? cudaSuccess : leave(cudaErrorNotReady);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  ENTER("cudaStreamIsCapturing");
  World& w = world();
  std::lock_guard lock(w.mutex);
  const Stream found = resolve(stream);
  if (found == nullptr) return leave(cudaErrorInvalidResourceHandle);
  const bool is_captured = w.capture && w.capture->stream == found.get();
  *status = is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  ENTER("cudaThreadExchangeStreamCaptureMode");
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*work)(void*), void* context) {
  ENTER("cudaLaunchHostFunc");
  const Stream found = find(stream);
  if (found == nullptr) return leave(cudaErrorInvalidResourceHandle);
  found->enqueue([work, context] { work(context); }, WorkKind::note);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  ENTER("cudaStreamWaitEvent");
  Stream found;
  std::shared_ptr<Record> record;  // of this moment
  {
    World& w = world();
    std::lock_guard lock(w.mutex);
    found = resolve(stream);
    if (found == nullptr || !w.events.count(event)) return leave(cudaErrorInvalidResourceHandle);
    record = event->last;
    if (!record) ++w.num_empty_waits;
  }
  if (record) found->enqueue([record] { record->stream->wait_until(record->position); }, WorkKind::note);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  ENTER("cudaEventCreateWithFlags");
  std::lock_guard lock(world().mutex);
  *event = new CUevent_st{current_device, (flags & cudaEventDisableTiming) == 0, nullptr};
  world().events.insert(*event);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  ENTER("cudaEventDestroy");
  std::lock_guard lock(world().mutex);
  if (world().events.erase(event) == 0) return leave(cudaErrorInvalidResourceHandle);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ENTER("cudaEventRecord");
  World& w = world();
  auto record = std::make_shared<Record>();
  {
    std::lock_guard lock(w.mutex);
    record->stream = resolve(stream);
    if (record->stream == nullptr || !w.events.count(event) || event->device != record->stream->device()) {
      return leave(cudaErrorInvalidResourceHandle);
    }
  }
  record->position = record->stream->enqueue([record] { record->reached_ns = now_ns(); }, WorkKind::note);
  std::lock_guard lock(w.mutex);
  if (w.events.count(event)) event->last = record;
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER("cudaEventQuery");
  std::shared_ptr<Record> record;
  {
    std::lock_guard lock(world().mutex);
    if (!world().events.count(event)) return leave(cudaErrorInvalidResourceHandle);
    record = event->last;
  }
  return !record || record->stream->poll(record->position) ? cudaSuccess : leave(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ENTER("cudaEventSynchronize");
  std::shared_ptr<Record> record;
  {
    std::lock_guard lock(world().mutex);
    if (!world().events.count(event)) return leave(cudaErrorInvalidResourceHandle);
    record = event->last;
  }
  if (record) wait_for(*record->stream, record->position);
  return outcome();
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  ENTER("cudaEventElapsedTime");
  std::lock_guard lock(world().mutex);
  for (const cudaEvent_t event : {start, end}) {
    if (!world().events.count(event) || !event->has_timing || !event->last) {
      return leave(cudaErrorInvalidResourceHandle);
    }
  }
  if (!start->last->is_done() || !end->last->is_done()) return leave(cudaErrorNotReady);
  *milliseconds = static_cast<float>(end->last->reached_ns - start->last->reached_ns) / 1e6F;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  ENTER("cudaMemcpyAsync");
  const Stream found = find(stream);
  if (found == nullptr) return leave(cudaErrorInvalidResourceHandle);
  const void* host = kind == cudaMemcpyHostToDevice ? from : kind == cudaMemcpyDeviceToHost ? to : nullptr;
  if (host != nullptr && memory().locate(host, size).kind != Place::Kind::registered) {
    return leave(cudaErrorHostMemoryNotRegistered);
  }
  for (const void* at : {static_cast<const void*>(to), from}) {
    if (at != host && !on_device(found->device(), at, size)) return leave(cudaErrorInvalidValue);
  }
  std::function<void()> held;
  {
    std::lock_guard lock(world().mutex);
    const auto it = world().held_copies.find(to);
    if (it != world().held_copies.end()) {
      held = std::move(it->second);
      world().held_copies.erase(it);
    }
  }
  if (held) found->enqueue(std::move(held), WorkKind::free);
  found->enqueue(
      [=] {
        void* const target = reach("cudaMemcpyAsync", to, size);
        const void* const source = reach("cudaMemcpyAsync", from, size);
        if (target != nullptr && source != nullptr) std::memcpy(target, source, size);
      },
      WorkKind::kernel);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* at, int value, std::size_t size, cudaStream_t stream) {
  ENTER("cudaMemsetAsync");
  const Stream found = find(stream);
  if (found == nullptr) return leave(cudaErrorInvalidResourceHandle);
  if (!on_device(found->device(), at, size)) return leave(cudaErrorInvalidValue);
  found->enqueue(
      [=] {
        if (void* const target = reach("cudaMemsetAsync", at, size)) std::memset(target, value, size);
      },
      WorkKind::kernel);
  return cudaSuccess;
}

}  // extern "C"
