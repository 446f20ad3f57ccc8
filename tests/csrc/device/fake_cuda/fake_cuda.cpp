#include "fake_cuda.h"

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

struct Record {  // one recording of an event
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;

  void finish() {
    std::lock_guard lock(mutex);
    done = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return done; });
  }
  bool is_done() {
    std::lock_guard lock(mutex);
    return done;
  }
};

}  // namespace

struct CUevent_st {
  int device;
  std::shared_ptr<Record> last;  // null: never recorded
};

struct CUstream_st {
  explicit CUstream_st(int on) : device(on), thread([this] { serve(); }) {}
  ~CUstream_st() {  // as CUDA: what was queued is still done
    {
      std::lock_guard lock(mutex);
      closing = true;
      changed.notify_all();
    }
    thread.join();
  }

  void enqueue(std::function<void()> work) {
    std::lock_guard lock(mutex);
    queue.push_back(std::move(work));
    changed.notify_all();
  }
  void serve() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return closing || !queue.empty(); });
      if (queue.empty()) return;
      auto work = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      work();
      lock.lock();
    }
  }

  const int device;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool closing = false;
  std::thread thread;  // last: it starts when all else is made
};

namespace {

using Range = std::pair<std::size_t, int>;  // size, device

constexpr std::size_t kPage = 4096;
std::size_t whole_pages(std::size_t size) { return (size + kPage - 1) / kPage * kPage; }

/// All memory of a device.
struct Block {
  int fd = -1;
  std::byte* begin = nullptr;
};

/// What a cudaIpcMemHandle_t holds, without gaps: handles are compared.
struct Handle {
  pid_t pid;
  int fd;
  std::size_t offset, size;
};
static_assert(sizeof(Handle) == 2 * sizeof(int) + 2 * sizeof(std::size_t));

struct Opened {
  cudaIpcMemHandle_t handle;
  int times;
};

struct World {
  std::mutex mutex;
  std::map<std::string, std::int64_t> counts;
  std::vector<std::string> log;
  struct Injected {
    std::string call;
    int nth;
    cudaError_t error;
  };
  std::vector<Injected> injected;
  Block blocks[fake_cuda::kNumDevices];
  std::map<const std::byte*, Range> device_memory, registered, opened_ranges;
  std::map<const std::byte*, Opened> opened;
  std::map<const void*, std::function<void()>> held_copies;
  std::int64_t num_empty_waits = 0;
  std::size_t used[fake_cuda::kNumDevices] = {};
  std::set<cudaStream_t> streams;
  std::set<cudaEvent_t> events;
  cudaStream_t default_stream[fake_cuda::kNumDevices] = {};
  struct Capture {
    cudaStream_t stream;
    std::thread::id thread;
    bool is_broken = false;
  };
  std::optional<Capture> capture;  // in mode "global"
};

World& world() {
  static World* the_world = new World;  // streams outlive everything that could destroy it
  return *the_world;
}

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
      "cudaMalloc",           "cudaFree",         "cudaHostRegister",     "cudaHostUnregister",
      "cudaIpcOpenMemHandle", "cudaEventQuery",   "cudaEventSynchronize", "cudaStreamSynchronize",
      "cudaIpcGetMemHandle",  "cudaStreamDestroy"};
  return capture_mode != cudaStreamCaptureModeRelaxed && unsafe.count(call) > 0;
}

/// Counts the call; the injected error, if its turn has come.
cudaError_t enter(const char* call) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  ++w.counts[call];
  w.log.push_back(call);
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
  return cudaSuccess;
}

#define ENTER(call)                                                  \
  do {                                                               \
    const cudaError_t injected_error = enter(call);                  \
    if (injected_error != cudaSuccess) return leave(injected_error); \
  } while (false)

/// The range that holds all of [memory, memory + size), or null.
const Range* holder(const std::map<const std::byte*, Range>& ranges, const void* memory, std::size_t size) {
  const auto* start = static_cast<const std::byte*>(memory);
  auto found = ranges.upper_bound(start);
  if (found == ranges.begin()) return nullptr;
  --found;
  return start + size <= found->first + found->second.first ? &found->second : nullptr;
}

/// Caller holds the world's mutex, as below. The device's own memory, or what was opened on it.
bool on_device(int device, const void* memory, std::size_t size) {
  for (const auto* ranges : {&world().device_memory, &world().opened_ranges}) {
    const Range* found = holder(*ranges, memory, size);
    if (found != nullptr && found->second == device) return true;
  }
  return false;
}

/// The first gap that is large enough, or null.
std::byte* gap(int device, std::size_t size) {
  World& w = world();
  Block& block = w.blocks[device];
  if (block.begin == nullptr) {
    block.fd = memfd_create("fake_cuda", MFD_CLOEXEC);
    if (ftruncate(block.fd, fake_cuda::kDeviceMemory) != 0) std::abort();
    void* begin = mmap(nullptr, fake_cuda::kDeviceMemory, PROT_READ | PROT_WRITE, MAP_SHARED, block.fd, 0);
    if (begin == MAP_FAILED) std::abort();
    block.begin = static_cast<std::byte*>(begin);
  }
  std::byte* begin = block.begin;
  for (auto it = w.device_memory.lower_bound(begin); it != w.device_memory.end(); ++it) {
    if (it->second.second != device || begin + size <= it->first) break;
    begin = block.begin + (it->first - block.begin) + whole_pages(it->second.first);
  }
  return begin + size <= block.begin + fake_cuda::kDeviceMemory ? begin : nullptr;
}

cudaStream_t resolve(cudaStream_t stream) {
  World& w = world();
  if (stream != nullptr && stream != cudaStreamLegacy) return w.streams.count(stream) ? stream : nullptr;
  cudaStream_t& own = w.default_stream[current_device];
  if (own == nullptr) own = new CUstream_st(current_device);
  return own;
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
  World& w = world();
  std::lock_guard lock(w.mutex);
  w.counts.clear();
  w.log.clear();
  w.injected.clear();
  w.held_copies.clear();
  w.registered.clear();
}

std::int64_t num_empty_waits() {
  std::lock_guard lock(world().mutex);
  return world().num_empty_waits;
}

Alive alive() {
  World& w = world();
  std::lock_guard lock(w.mutex);
  return {static_cast<std::int64_t>(w.device_memory.size()), static_cast<std::int64_t>(w.registered.size()),
          static_cast<std::int64_t>(w.streams.size()), static_cast<std::int64_t>(w.events.size()),
          static_cast<std::int64_t>(w.opened.size())};
}

cudaError_t pending_error() { return last_error; }

cudaStream_t make_stream() {
  auto* stream = new CUstream_st(current_device);
  std::lock_guard lock(world().mutex);
  world().streams.insert(stream);
  return stream;
}

void begin_capture(cudaStream_t stream) {
  std::lock_guard lock(world().mutex);
  world().capture = World::Capture{resolve(stream), std::this_thread::get_id()};
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

void run_on(cudaStream_t stream, std::function<void()> work) {
  cudaStream_t found = nullptr;
  {
    std::lock_guard lock(world().mutex);
    found = resolve(stream);
  }
  if (found != nullptr) found->enqueue(std::move(work));
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
  return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the fake CUDA runtime";
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
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  ENTER("cudaDeviceGetAttribute");
  if (device < 0 || device >= fake_cuda::kNumDevices) return leave(cudaErrorInvalidDevice);
  if (attribute != cudaDevAttrCanUseHostPointerForRegisteredMem) return leave(cudaErrorInvalidValue);
  *value = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  ENTER("cudaDeviceGetPCIBusId");
  if (device < 0 || device >= fake_cuda::kNumDevices) return leave(cudaErrorInvalidDevice);
  std::snprintf(id, static_cast<std::size_t>(size), "0000:%02X:00.0", 0x3B + device);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t size) {
  ENTER("cudaMalloc");
  World& w = world();
  std::lock_guard lock(w.mutex);
  if (w.used[current_device] + size > fake_cuda::kDeviceMemory) return leave(cudaErrorMemoryAllocation);
  *memory = gap(current_device, size);
  if (*memory == nullptr) return leave(cudaErrorMemoryAllocation);
  w.used[current_device] += size;
  w.device_memory[static_cast<std::byte*>(*memory)] = {size, current_device};
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  ENTER("cudaFree");
  World& w = world();
  std::lock_guard lock(w.mutex);
  const auto found = w.device_memory.find(static_cast<std::byte*>(memory));
  if (found == w.device_memory.end()) return leave(cudaErrorInvalidValue);
  w.used[found->second.second] -= found->second.first;
  madvise(memory, whole_pages(found->second.first), MADV_REMOVE);
  w.device_memory.erase(found);
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  ENTER("cudaIpcGetMemHandle");
  World& w = world();
  std::lock_guard lock(w.mutex);
  const auto found = w.device_memory.find(static_cast<std::byte*>(memory));
  if (found == w.device_memory.end()) return leave(cudaErrorInvalidValue);
  const auto [size, device] = found->second;
  const Block& block = w.blocks[device];
  const Handle told{getpid(), block.fd, static_cast<std::size_t>(found->first - block.begin), size};
  *handle = {};
  std::memcpy(handle, &told, sizeof(told));
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned int flags) {
  ENTER("cudaIpcOpenMemHandle");
  World& w = world();
  std::lock_guard lock(w.mutex);
  if (flags != cudaIpcMemLazyEnablePeerAccess) return leave(cudaErrorInvalidValue);
  for (auto& [address, opened] : w.opened) {
    if (std::memcmp(&opened.handle, &handle, sizeof(handle)) != 0 || w.opened_ranges[address].second != current_device)
      continue;
    ++opened.times;
    *memory = const_cast<std::byte*>(address);
    return cudaSuccess;
  }
  Handle told{};
  std::memcpy(&told, &handle, sizeof(told));
  const std::string path = "/proc/" + std::to_string(told.pid) + "/fd/" + std::to_string(told.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return leave(cudaErrorMapBufferObjectFailed);
  void* mapped =
      mmap(nullptr, whole_pages(told.size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(told.offset));
  close(fd);
  if (mapped == MAP_FAILED) return leave(cudaErrorMapBufferObjectFailed);
  *memory = mapped;
  w.opened[static_cast<std::byte*>(mapped)] = {handle, 1};
  w.opened_ranges[static_cast<std::byte*>(mapped)] = {told.size, current_device};
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* memory) {
  ENTER("cudaIpcCloseMemHandle");
  World& w = world();
  std::lock_guard lock(w.mutex);
  const auto found = w.opened.find(static_cast<std::byte*>(memory));
  if (found == w.opened.end()) return leave(cudaErrorInvalidValue);
  const auto [size, device] = w.opened_ranges[found->first];
  if (device != current_device) return leave(cudaErrorInvalidValue);
  if (--found->second.times > 0) return cudaSuccess;
  munmap(memory, whole_pages(size));
  w.opened_ranges.erase(found->first);
  w.opened.erase(found);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  ENTER("cudaMemGetInfo");
  std::lock_guard lock(world().mutex);
  *total = fake_cuda::kDeviceMemory;
  *free = *total - world().used[current_device];
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* memory, std::size_t size, unsigned int) {
  ENTER("cudaHostRegister");
  World& w = world();
  std::lock_guard lock(w.mutex);
  if (memory == nullptr || size == 0) return leave(cudaErrorInvalidValue);
  const auto* start = static_cast<const std::byte*>(memory);
  for (const auto& [other, range] : w.registered) {
    if (start < other + range.first && other < start + size) return leave(cudaErrorHostMemoryAlreadyRegistered);
  }
  w.registered[start] = {size, current_device};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* memory) {
  ENTER("cudaHostUnregister");
  std::lock_guard lock(world().mutex);
  return world().registered.erase(static_cast<std::byte*>(memory)) ? cudaSuccess
                                                                   : leave(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned int) {
  ENTER("cudaHostGetDevicePointer");
  std::lock_guard lock(world().mutex);
  if (holder(world().registered, host, 1) == nullptr) return leave(cudaErrorInvalidValue);
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
  {
    std::lock_guard lock(world().mutex);
    if (world().streams.erase(stream) == 0) return leave(cudaErrorInvalidResourceHandle);
  }
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ENTER("cudaStreamSynchronize");
  auto record = std::make_shared<Record>();
  {
    std::lock_guard lock(world().mutex);
    stream = resolve(stream);
    if (stream == nullptr) return leave(cudaErrorInvalidResourceHandle);
    stream->enqueue([record] { record->finish(); });
  }
  record->wait();
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  ENTER("cudaStreamIsCapturing");
  World& w = world();
  std::lock_guard lock(w.mutex);
  stream = resolve(stream);
  if (stream == nullptr) return leave(cudaErrorInvalidResourceHandle);
  const bool is_captured = w.capture && w.capture->stream == stream;
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
  std::lock_guard lock(world().mutex);
  stream = resolve(stream);
  if (stream == nullptr) return leave(cudaErrorInvalidResourceHandle);
  stream->enqueue([work, context] { work(context); });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  ENTER("cudaStreamWaitEvent");
  World& w = world();
  std::lock_guard lock(w.mutex);
  stream = resolve(stream);
  if (stream == nullptr || !w.events.count(event)) return leave(cudaErrorInvalidResourceHandle);
  if (event->last) {
    stream->enqueue([record = event->last] { record->wait(); });  // the record of this moment
  } else {
    ++w.num_empty_waits;
  }
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  ENTER("cudaEventCreateWithFlags");
  std::lock_guard lock(world().mutex);
  *event = new CUevent_st{current_device, nullptr};
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
  std::lock_guard lock(w.mutex);
  stream = resolve(stream);
  if (stream == nullptr || !w.events.count(event) || event->device != stream->device) {
    return leave(cudaErrorInvalidResourceHandle);
  }
  event->last = std::make_shared<Record>();
  stream->enqueue([record = event->last] { record->finish(); });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER("cudaEventQuery");
  std::lock_guard lock(world().mutex);
  if (!world().events.count(event)) return leave(cudaErrorInvalidResourceHandle);
  return event->last == nullptr || event->last->is_done() ? cudaSuccess : leave(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ENTER("cudaEventSynchronize");
  std::shared_ptr<Record> record;
  {
    std::lock_guard lock(world().mutex);
    if (!world().events.count(event)) return leave(cudaErrorInvalidResourceHandle);
    record = event->last;
  }
  if (record) record->wait();
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  ENTER("cudaMemcpyAsync");
  World& w = world();
  std::lock_guard lock(w.mutex);
  stream = resolve(stream);
  if (stream == nullptr) return leave(cudaErrorInvalidResourceHandle);
  const void* host = kind == cudaMemcpyHostToDevice ? from : kind == cudaMemcpyDeviceToHost ? to : nullptr;
  if (host != nullptr && holder(w.registered, host, size) == nullptr) return leave(cudaErrorHostMemoryNotRegistered);
  for (const void* memory : {static_cast<const void*>(to), from}) {
    if (memory != host && !on_device(stream->device, memory, size)) return leave(cudaErrorInvalidValue);
  }
  const auto held = w.held_copies.find(to);
  if (held != w.held_copies.end()) {
    stream->enqueue(std::move(held->second));
    w.held_copies.erase(held);
  }
  stream->enqueue([=] { std::memcpy(to, from, size); });
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t size, cudaStream_t stream) {
  ENTER("cudaMemsetAsync");
  World& w = world();
  std::lock_guard lock(w.mutex);
  stream = resolve(stream);
  if (stream == nullptr) return leave(cudaErrorInvalidResourceHandle);
  if (!on_device(stream->device, memory, size)) return leave(cudaErrorInvalidValue);
  stream->enqueue([=] { std::memset(memory, value, size); });
  return cudaSuccess;
}

}  // extern "C"
