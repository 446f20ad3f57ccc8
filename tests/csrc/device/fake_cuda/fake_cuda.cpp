#include "fake_cuda.h"

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

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
  std::map<const std::byte*, Range> device_memory, registered;
  std::int64_t num_empty_waits = 0;
  std::size_t used[fake_cuda::kNumDevices] = {};
  std::set<cudaStream_t> streams;
  std::set<cudaEvent_t> events;
  cudaStream_t default_stream[fake_cuda::kNumDevices] = {};
};

World& world() {
  static World* the_world = new World;  // streams outlive everything that could destroy it
  return *the_world;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t leave(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

/// Counts the call; the injected error, if its turn has come.
cudaError_t enter(const char* call) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  ++w.counts[call];
  w.log.push_back(call);
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

/// Caller holds the world's mutex.
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
          static_cast<std::int64_t>(w.streams.size()), static_cast<std::int64_t>(w.events.size())};
}

cudaError_t pending_error() { return last_error; }

cudaStream_t make_stream() {
  auto* stream = new CUstream_st(current_device);
  std::lock_guard lock(world().mutex);
  world().streams.insert(stream);
  return stream;
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
  case cudaErrorUnknown:
    return "cudaErrorUnknown";
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the fake CUDA runtime";
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
  *memory = std::aligned_alloc(512, (size + 511) / 512 * 512);
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
  w.device_memory.erase(found);
  std::free(memory);
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
  const Range* host = holder(w.registered, kind == cudaMemcpyHostToDevice ? from : to, size);
  const Range* device = holder(w.device_memory, kind == cudaMemcpyHostToDevice ? to : from, size);
  if (host == nullptr) return leave(cudaErrorHostMemoryNotRegistered);
  if (device == nullptr || device->second != stream->device) return leave(cudaErrorInvalidValue);
  stream->enqueue([=] { std::memcpy(to, from, size); });
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t size, cudaStream_t stream) {
  ENTER("cudaMemsetAsync");
  World& w = world();
  std::lock_guard lock(w.mutex);
  stream = resolve(stream);
  if (stream == nullptr) return leave(cudaErrorInvalidResourceHandle);
  const Range* device = holder(w.device_memory, memory, size);
  if (device == nullptr || device->second != stream->device) return leave(cudaErrorInvalidValue);
  stream->enqueue([=] { std::memset(memory, value, size); });
  return cudaSuccess;
}

}  // extern "C"
