// The verbs of device/backend.h on the CUDA runtime. The only file that sees it.
//
// Ownership: a non-blocking stream for each copy lane (copy engines are per direction, more streams add nothing; but
//   each link of the peer lane has one), a host thread for each lane that never takes the GIL, a thread for each lane
//   that follows the device for the numbers, and a pool of events.
// Order: a transfer's thread waits on the host until its tickets are issued (event tickets) or passed (host tickets),
//   then queues stream waits, copies and the event; only then is its own ticket issued. So no stream is ever asked to
//   wait for an event that has not been recorded.
//
// Note [Pending errors]. A failed runtime call also leaves its error behind for the next caller of cudaGetLastError,
// which would be torch, in a place that has nothing to do with us. Every failure here takes its error away again.
//
// Note [Staged home]. Memory that the driver refuses to pin cannot be copied behind the host's back, so a lane's thread
// carries it through a pinned ring (device/staging_ring.h) and takes part in the order itself. Up, it writes the home
// after the piece has arrived behind the same stream waits as any copy, and the op's event is recorded when all has
// landed: whoever waits for the ticket to be issued waits that much longer, and for nothing that could wait for him.
// Down, it reads the home once the transfer's tickets are issued. That is enough: the device cannot write such memory,
// so only the host and drains do, and theirs are issued after they have written.
//
// Note [Links]. The link that the peer lane sees first has the lane's own stream, every other one a stream of its own,
// made when it is first used. An op that uses others forks them from the lane's stream, behind the op's waits, and
// joins them to it before its fills and its event; so they order nothing by themselves, and whoever waits for the lane
// waits for all of them. Both by events that are recorded again in every op: a stream that waits captured the record.
//
// Note [Current device]. Threads of ours are on our device for good. On a caller's thread the device is changed only
// where CUDA looks at it (allocation, registration, creation of events, the default stream) and put back after.
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/errors.h"
#include "device/host_lane.h"
#include "device/host_memory.h"
#include "device/host_ticket.h"
#include "device/lane_follower.h"
#include "device/lane_ledger.h"
#include "device/opened_memory.h"
#include "device/staging_ring.h"
#include "device/timing.h"

namespace noria {

#ifdef NORIA_HAVE_KERNELS
void hold_stream(void* stream, std::int64_t us);  // kernels/hold.cu
#endif

namespace {

[[noreturn]] void fail(cudaError_t error, const std::string& call) {
  (void)cudaGetLastError();  // Note [Pending errors]
  throw MachineError(call + " failed: " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

void check(cudaError_t error, const char* call, int device, Bytes bytes = {}) {
  if (error == cudaSuccess) return;
  const std::string size =
      bytes.count > 0 ? " of " + to_string(bytes) + " (" + std::to_string(bytes.count) + " bytes)" : std::string();
  fail(error, call + size + " on cuda:" + std::to_string(device));
}

/// For threads of ours.
void use_device(int device) { check(cudaSetDevice(device), "cudaSetDevice", device); }

/// For threads of others: Note [Current device].
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice", device);
    if (previous_ == device) return;
    use_device(device);
    changed_ = true;
  }
  ~OnDevice() {
    if (changed_ && cudaSetDevice(previous_) != cudaSuccess) (void)cudaGetLastError();
  }
  OnDevice(const OnDevice&) = delete;  // puts back once
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

/// Events are made up to the steady need and used again. Tickets may outlive the backend: what comes back after
/// `close` is destroyed. An event that comes back before the device has passed it may be recorded again at once: a
/// stream that waits for it captured the earlier record.
class EventPool {
 public:
  explicit EventPool(int device) : device_(device), pid_(getpid()) {}

  cudaEvent_t take() {
    std::lock_guard lock(mutex_);
    if (idle_.empty()) {
      OnDevice on(device_);
      cudaEvent_t event = nullptr;
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
            "cudaEventCreateWithFlags", device_);
      ++num_created_;
      return event;
    }
    cudaEvent_t event = idle_.back();
    idle_.pop_back();
    return event;
  }
  void give_back(cudaEvent_t event) noexcept {
    if (getpid() != pid_) return;  // a forked child must not touch CUDA
    std::lock_guard lock(mutex_);
    if (closed_) {
      destroy(event);
    } else {
      idle_.push_back(event);
    }
  }
  void close() noexcept {
    std::lock_guard lock(mutex_);
    closed_ = true;
    for (cudaEvent_t event : idle_) destroy(event);
    idle_.clear();
  }
  std::int64_t num_created() const {
    std::lock_guard lock(mutex_);
    return num_created_;
  }

 private:
  static void destroy(cudaEvent_t event) noexcept {
    if (cudaEventDestroy(event) != cudaSuccess) (void)cudaGetLastError();
  }

  const int device_;
  const pid_t pid_;
  mutable std::mutex mutex_;
  std::vector<cudaEvent_t> idle_;
  std::int64_t num_created_ = 0;
  bool closed_ = false;
};

/// A point in a stream. Issued when its event has been recorded; before that there is no event.
class CudaTicket final : public TicketState {
 public:
  CudaTicket(const OpLabel& op, int device, std::shared_ptr<EventPool> events, Bytes bytes = {})
      : TicketState(op),
        device_(device),
        bytes_(bytes),
        events_(std::move(events)),
        issued_(op) {}
  ~CudaTicket() override {
    if (event_ != nullptr) events_->give_back(event_);
  }

  bool passed() const override {
    if (passed_) return true;
    if (!issued_.passed()) return false;
    if (!recorded_) return true;  // failed
    const cudaError_t error = cudaEventQuery(event_);
    if (error == cudaSuccess) {
      passed_ = true;
      return true;
    }
    (void)cudaGetLastError();           // "not ready" is left behind like any error
    return error != cudaErrorNotReady;  // a broken device: wait_passed will say so
  }
  void wait_passed() override {
    issued_.wait_passed();
    if (passed_) return;
    check(cudaEventSynchronize(event_), "cudaEventSynchronize", device_);
    passed_ = true;
  }
  void wait_issued() override { issued_.wait_passed(); }
  void when_issued(std::function<void()> callback) override { issued_.when_done(std::move(callback)); }

  void record(cudaStream_t stream) {
    NORIA_INVARIANT(!issued_.passed(), "the ticket of a " + std::string(to_string(label.verb)) + " op was given twice");
    event_ = events_->take();
    check(cudaEventRecord(event_, stream), "cudaEventRecord", device_);
    recorded_ = true;
    issued_.pass();
  }
  void fail(std::exception_ptr error) { issued_.fail(std::move(error)); }
  std::int64_t opened_ns() const { return opened_ns_; }
  Bytes bytes() const { return bytes_; }
  /// Only after `wait_issued`.
  void hold_back(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent", device_);
  }

 private:
  const int device_;
  const Bytes bytes_;
  const std::int64_t opened_ns_ = now_ns();
  const std::shared_ptr<EventPool> events_;
  cudaEvent_t event_ = nullptr;  // these two are written before `issued_` passes, and read only after
  bool recorded_ = false;
  HostTicket issued_;
  mutable std::atomic<bool> passed_ = false;
};

/// `stream` waits for an issued ticket. A host ticket that is issued has passed.
void hold_back(cudaStream_t stream, const Ticket& ticket) {
  if (const auto* on_device = dynamic_cast<const CudaTicket*>(ticket.get())) on_device->hold_back(stream);
}

/// The streams of the peer lane: Note [Links]. Of the lane's thread alone, until `close`.
class PeerLinks {
 public:
  PeerLinks(int device, std::shared_ptr<EventPool> events) : device_(device), events_(std::move(events)) {}

  void copy(const std::vector<CopySpan>& copies, cudaStream_t lane) {
    std::vector<Other*> links;  // by copy; null: the lane's own stream
    std::set<Other*> used;
    for (const CopySpan& span : copies) {
      links.push_back(other(span.link));
      if (links.back() != nullptr) used.insert(links.back());
    }
    if (!used.empty()) check(cudaEventRecord(forked_, lane), "cudaEventRecord", device_);
    for (Other* link : used) check(cudaStreamWaitEvent(link->stream, forked_, 0), "cudaStreamWaitEvent", device_);
    try {
      for (std::size_t i = 0; i < copies.size(); ++i) {
        const CopySpan& span = copies[i];
        check(cudaMemcpyAsync(span.to, span.from, static_cast<std::size_t>(span.bytes.count), cudaMemcpyDeviceToDevice,
                              links[i] == nullptr ? lane : links[i]->stream),
              "cudaMemcpyAsync", device_, span.bytes);
      }
      for (Other* link : used) {
        check(cudaEventRecord(link->joined, link->stream), "cudaEventRecord", device_);
        check(cudaStreamWaitEvent(lane, link->joined, 0), "cudaStreamWaitEvent", device_);
      }
    } catch (...) {  // what comes next on the lane must not meet what is still under way
      for (Other* link : used) {
        if (cudaStreamSynchronize(link->stream) != cudaSuccess) (void)cudaGetLastError();
      }
      throw;
    }
  }

  /// After the lane's stream was synchronized.
  cudaError_t close() {
    cudaError_t first = cudaSuccess;
    for (auto& [link, other] : others_) {
      const cudaError_t error = other.stream == nullptr ? cudaSuccess : cudaStreamDestroy(other.stream);
      if (first == cudaSuccess) first = error;
      if (other.joined != nullptr) events_->give_back(other.joined);
    }
    if (forked_ != nullptr) events_->give_back(forked_);
    others_.clear();
    forked_ = nullptr;
    return first;
  }

 private:
  struct Other {
    cudaStream_t stream = nullptr;
    cudaEvent_t joined = nullptr;
  };

  Other* other(int link) {
    if (link == first_.value_or(link)) {
      first_ = link;
      return nullptr;
    }
    Other& found = others_[link];  // what could not be made is made in the next op
    if (forked_ == nullptr) forked_ = events_->take();
    if (found.joined == nullptr) found.joined = events_->take();
    if (found.stream == nullptr) {
      check(cudaStreamCreateWithFlags(&found.stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags", device_);
    }
    return &found;
  }

  const int device_;
  const std::shared_ptr<EventPool> events_;
  std::optional<int> first_;
  std::map<int, Other> others_;
  cudaEvent_t forked_ = nullptr;
};

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(const CudaBackendOptions& options);
  ~CudaBackend() override;

  std::string name() const override { return "cuda:" + std::to_string(device_); }

  std::byte* allocate(Bytes bytes) override;
  void free(std::byte* memory) override;
  std::byte* allocate_shared(Bytes bytes) override;
  SharedMemory shared(std::byte* memory) const override;
  std::byte* open_shared(const SharedMemory& told) override;
  void close_shared(std::byte* memory) override;
  Bytes allocated() const override;
  Bytes capacity() const override { return options_.capacity; }
  std::int64_t num_allocations() const override;
  std::int64_t num_events() const override { return events_->num_created(); }

  std::string register_home(std::byte* memory, Bytes bytes, HomeUse use) override;
  void unregister_home(std::byte* memory) override;
  std::byte* device_address(std::byte* home_memory) const override;
  Bytes staging_bytes() const override;
  std::string pci_bus_id() const override;

  Ticket submit(const OpLabel& label, Transfer transfer, std::vector<Ticket> waits) override;
  Ticket open(const OpLabel& label, Bytes bytes) override;
  void give(const Ticket& ticket, Stream stream) override;
  void give_failed(const Ticket& ticket, std::exception_ptr error) override;
  void wait(const std::vector<Ticket>& tickets, Stream stream, const OpLabel& waiter) override;

  void idle() override;
  void close() override;

  LaneStats stats(Lane lane) const override { return ledger_.stats(lane); }
  void set_trace(std::shared_ptr<Trace> trace) override { ledger_.set_trace(std::move(trace)); }
  bool pins() const override { return true; }
  bool poisons() const override { return options_.hostility.poison; }

 private:
  struct CopyLane {
    CopyLane(Lane lane, cudaMemcpyKind kind, const CudaBackendOptions& options, LaneLedger& ledger)
        : kind(kind),
          delays(options.hostility, lane),
          follower(lane, ledger, [device = options.device_index] { use_device(device); }),
          thread(std::string(to_string(lane))) {}
    const cudaMemcpyKind kind;
    cudaStream_t stream = nullptr;
    std::unique_ptr<StagingRing> ring;     // Note [Staged home]; made before anything is submitted that needs it
    std::vector<cudaEvent_t> ring_events;  // by piece
    Delays delays;
    LaneFollower follower;
    HostLane thread;  // last: it is gone before what it uses
  };
  class RingLink;

  std::array<CopyLane*, 3> copy_lanes() { return {&fetch_, &drain_, &peer_}; }
  CopyLane& copy_lane(Lane lane);
  std::byte* take(Bytes bytes, bool for_others);
  void run(CopyLane& lane, const OpLabel& label, const Transfer& transfer, const std::vector<bool>& staged,
           const std::vector<Ticket>& waits, const std::shared_ptr<CudaTicket>& ticket, std::int64_t submitted_ns);
  void copy(CopyLane& lane, const Transfer& transfer, const std::vector<bool>& staged);
  std::vector<bool> staged_copies(const CopyLane& lane, const Transfer& transfer) const;
  void make_rings();
  cudaError_t free_rings();
  cudaError_t close_opened();
  CudaTicket& as_cuda_ticket(const Ticket& ticket) const;
  LaneFollower& follower_of(Lane lane);
  void hold_compute(cudaStream_t stream, Verb verb);

  const CudaBackendOptions options_;
  const int device_;
  const std::shared_ptr<EventPool> events_;
  LaneLedger ledger_;
  Delays compute_delays_;
  LaneFollower compute_follower_, collect_follower_;
  CopyLane fetch_, drain_, peer_;
  PeerLinks links_;
  bool closed_ = false;
  std::mutex close_mutex_;

  mutable std::mutex mutex_;  // protects all below
  struct Allocation {
    Bytes bytes;
    bool for_others = false;
  };
  std::map<std::byte*, Allocation> allocations_;
  OpenedMemory opened_;
  bool opened_closed_ = false;
  std::map<const std::byte*, Bytes> registered_, staged_;
  std::byte* ring_memory_ = nullptr;  // of both lanes, in one registration
  Bytes allocated_;
  std::int64_t num_allocations_ = 0;
};

/// How a lane's thread moves pieces of its ring.
class CudaBackend::RingLink final : public StagingRing::Link {
 public:
  RingLink(CopyLane& lane, int device) : lane_(lane), device_(device) {}
  void copy(std::byte* to, const std::byte* from, Bytes bytes) override {
    check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes.count), lane_.kind, lane_.stream), "cudaMemcpyAsync",
          device_, bytes);
  }
  void mark(std::size_t piece) override {
    check(cudaEventRecord(lane_.ring_events.at(piece), lane_.stream), "cudaEventRecord", device_);
  }
  void await(std::size_t piece) override {
    check(cudaEventSynchronize(lane_.ring_events.at(piece)), "cudaEventSynchronize", device_);
  }

 private:
  CopyLane& lane_;
  const int device_;
};

/// True when one range holds all of [memory, memory + bytes).
bool holds(const std::map<const std::byte*, Bytes>& ranges, const std::byte* memory, Bytes bytes) {
  const auto range = ranges.upper_bound(memory);
  return range != ranges.begin() && memory + bytes.count <= std::prev(range)->first + std::prev(range)->second.count;
}

CudaBackend::CudaBackend(const CudaBackendOptions& options)
    : options_(options),
      device_(options.device_index),
      events_(std::make_shared<EventPool>(device_)),
      compute_delays_(options.hostility, Lane::compute),
      compute_follower_(Lane::compute, ledger_, [device = device_] { use_device(device); }),
      collect_follower_(Lane::collect, ledger_, [device = device_] { use_device(device); }),
      fetch_(Lane::fetch, cudaMemcpyHostToDevice, options, ledger_),
      drain_(Lane::drain, cudaMemcpyDeviceToHost, options, ledger_),
      // Not cudaMemcpyDefault, which would take an address of the home for what it is and go through the host.
      peer_(Lane::peer, cudaMemcpyDeviceToDevice, options, ledger_),
      links_(device_, events_) {
  OnDevice on(device_);
  cudaError_t error = cudaSuccess;
  for (CopyLane* lane : copy_lanes()) {
    if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking);
  }
  if (error == cudaSuccess) return;
  for (CopyLane* lane : copy_lanes()) {
    if (lane->stream != nullptr) (void)cudaStreamDestroy(lane->stream);
  }
  check(error, "cudaStreamCreateWithFlags", device_);
}

CudaBackend::~CudaBackend() {
  try {
    close();
  } catch (...) {  // NOLINT(bugprone-empty-catch): whoever wants to hear of it calls close()
  }
}

// ---- memory ----

std::byte* CudaBackend::allocate(Bytes bytes) { return take(bytes, false); }

std::byte* CudaBackend::allocate_shared(Bytes bytes) { return take(bytes, true); }

std::byte* CudaBackend::take(Bytes bytes, bool for_others) {
  NORIA_INVARIANT(bytes.count > 0, "an allocation of nothing");
  std::lock_guard lock(mutex_);
  OnDevice on(device_);
  const std::string policy =
      " under a capacity of " + to_string(options_.capacity) + ", of which " + to_string(allocated_) + " are taken";
  if (allocated_ + bytes > options_.capacity) {
    throw MachineError("allocating " + to_string(bytes) + " on " + name() + " failed" + policy);
  }
  // Plain cudaMalloc: a pipeline neighbour can open such memory (cudaIpcGetMemHandle), which memory of a stream-ordered
  // pool or of an expandable segment does not allow. He opens the whole block that it is cut from: hence whole ones.
  const Bytes whole = for_others ? align_up(bytes, kDeviceAlignment) : bytes;
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, static_cast<std::size_t>(whole.count));
  if (error != cudaSuccess) {
    std::size_t free = 0, total = 0;
    std::string found;
    if (cudaMemGetInfo(&free, &total) == cudaSuccess) {
      found = " with " + to_string(Bytes{static_cast<std::int64_t>(free)}) + " free of " +
              to_string(Bytes{static_cast<std::int64_t>(total)});
    }
    fail(error, "cudaMalloc of " + to_string(bytes) + " on " + name() + found + policy);
  }
  auto* device_memory = static_cast<std::byte*>(memory);
  allocations_.emplace(device_memory, Allocation{bytes, for_others});
  allocated_ += bytes;
  ++num_allocations_;
  return device_memory;
}

void CudaBackend::free(std::byte* memory) {
  if (fetch_.thread.is_forked()) return;
  std::lock_guard lock(mutex_);
  const auto found = allocations_.find(memory);
  NORIA_INVARIANT(found != allocations_.end(), "freed what " + name() + " did not allocate");
  const Bytes bytes = found->second.bytes;
  allocated_ -= bytes;
  allocations_.erase(found);
  OnDevice on(device_);
  check(cudaFree(memory), "cudaFree", device_, bytes);
}

SharedMemory CudaBackend::shared(std::byte* memory) const {
  std::lock_guard lock(mutex_);
  const auto found = allocations_.find(memory);
  NORIA_INVARIANT(found != allocations_.end() && found->second.for_others, "told of memory that is not shared");
  OnDevice on(device_);
  SharedMemory told{found->second.bytes, -1, {}};
  cudaIpcMemHandle_t handle{};
  check(cudaIpcGetMemHandle(&handle, memory), "cudaIpcGetMemHandle", device_, told.bytes);
  static_assert(sizeof(handle) == sizeof(told.handle));
  std::memcpy(told.handle.data(), &handle, sizeof(handle));
  return told;
}

std::byte* CudaBackend::open_shared(const SharedMemory& told) {
  std::lock_guard lock(mutex_);
  OnDevice on(device_);
  cudaIpcMemHandle_t handle{};
  std::memcpy(&handle, told.handle.data(), sizeof(handle));
  void* memory = nullptr;
  check(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle", device_,
        told.bytes);
  opened_.add(static_cast<std::byte*>(memory), told.bytes);
  return static_cast<std::byte*>(memory);
}

void CudaBackend::close_shared(std::byte* memory) {
  if (fetch_.thread.is_forked()) return;
  std::lock_guard lock(mutex_);
  if (opened_closed_) return;
  const Bytes bytes = opened_.remove(memory);
  OnDevice on(device_);
  check(cudaIpcCloseMemHandle(memory), "cudaIpcCloseMemHandle", device_, bytes);
}

Bytes CudaBackend::allocated() const {
  std::lock_guard lock(mutex_);
  return allocated_;
}

std::int64_t CudaBackend::num_allocations() const {
  std::lock_guard lock(mutex_);
  return num_allocations_;
}

std::string CudaBackend::register_home(std::byte* memory, Bytes bytes, HomeUse use) {
  std::lock_guard lock(mutex_);
  OnDevice on(device_);
  // One call a range: a copy may not span two registered ranges. Mapped, because the device reads held gradients in it.
  const cudaError_t error = cudaHostRegister(memory, static_cast<std::size_t>(bytes.count),
                                             cudaHostRegisterPortable | cudaHostRegisterMapped);
  // What is registered already is our mistake, or somebody else's memory: no reason to go another way.
  if (error == cudaSuccess || use == HomeUse::device || error == cudaErrorHostMemoryAlreadyRegistered) {
    check(error, "cudaHostRegister", device_, bytes);
    registered_.emplace(memory, bytes);
    return {};
  }
  (void)cudaGetLastError();  // Note [Pending errors]
  if (ring_memory_ == nullptr) make_rings();
  staged_.emplace(memory, bytes);
  return "cudaHostRegister of " + to_string(bytes) + " on " + name() + " failed: " + cudaGetErrorString(error) + " (" +
         cudaGetErrorName(error) + ")";
}

void CudaBackend::unregister_home(std::byte* memory) {
  if (fetch_.thread.is_forked()) return;
  std::lock_guard lock(mutex_);
  if (staged_.erase(memory) > 0) return;
  const auto found = registered_.find(memory);
  NORIA_INVARIANT(found != registered_.end(), "unregistered what " + name() + " had not registered");
  const Bytes bytes = found->second;
  registered_.erase(found);
  OnDevice on(device_);
  check(cudaHostUnregister(memory), "cudaHostUnregister", device_, bytes);
}

std::byte* CudaBackend::device_address(std::byte* home_memory) const {
  {
    std::lock_guard lock(mutex_);
    if (holds(staged_, home_memory, Bytes{1})) return nullptr;
  }
  OnDevice on(device_);
  void* address = nullptr;
  check(cudaHostGetDevicePointer(&address, home_memory, 0), "cudaHostGetDevicePointer", device_);
  return static_cast<std::byte*>(address);
}

std::string CudaBackend::pci_bus_id() const {
  std::array<char, 32> id{};
  check(cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), device_), "cudaDeviceGetPCIBusId", device_);
  return id.data();
}

Bytes CudaBackend::staging_bytes() const {
  std::lock_guard lock(mutex_);
  return ring_memory_ == nullptr ? Bytes{} : options_.staging_bytes();
}

/// Caller holds the mutex, and is on our device.
void CudaBackend::make_rings() {
  const Bytes bytes = options_.staging_bytes();
  std::byte* const memory = map_pages(bytes);
  if (memory == nullptr) {
    throw MachineError("mmap of " + to_string(bytes) + " for the staging ring of " + name() +
                       " failed: " + std::generic_category().message(errno));
  }
  const auto size = static_cast<std::size_t>(bytes.count);
  madvise(memory, size, MADV_DONTFORK);  // advice: a child that inherits it only shares pages that it never uses
  const cudaError_t error = cudaHostRegister(memory, size, cudaHostRegisterPortable);
  if (error != cudaSuccess) {
    unmap_pages(memory, bytes);
    check(error, "cudaHostRegister for the staging ring", device_, bytes);
  }
  ring_memory_ = memory;
  std::byte* begin = memory;
  for (CopyLane* lane : {&fetch_, &drain_}) {
    for (int i = 0; i < options_.num_staging_pieces; ++i) lane->ring_events.push_back(events_->take());
    lane->ring = std::make_unique<StagingRing>(begin, options_.staging_piece, options_.num_staging_pieces);
    begin += options_.staging_piece.count * options_.num_staging_pieces;
  }
}

/// After the lanes have ended.
cudaError_t CudaBackend::free_rings() {
  std::lock_guard lock(mutex_);
  for (CopyLane* lane : {&fetch_, &drain_}) {
    for (cudaEvent_t event : lane->ring_events) events_->give_back(event);
    lane->ring_events.clear();
    lane->ring.reset();
  }
  std::byte* const memory = std::exchange(ring_memory_, nullptr);
  if (memory == nullptr) return cudaSuccess;
  const cudaError_t error = cudaHostUnregister(memory);
  unmap_pages(memory, options_.staging_bytes());
  return error;
}

/// After the lanes have ended.
cudaError_t CudaBackend::close_opened() {
  std::lock_guard lock(mutex_);
  cudaError_t first = cudaSuccess;
  try {
    OnDevice on(device_);
    for (const auto& [memory, bytes] : opened_) {
      const cudaError_t error = cudaIpcCloseMemHandle(memory);
      if (first == cudaSuccess) first = error;
    }
  } catch (const MachineError&) {
    first = cudaErrorInvalidDevice;
  }
  opened_.clear();
  opened_closed_ = true;
  return first;
}

// ---- transfers ----

CudaBackend::CopyLane& CudaBackend::copy_lane(Lane lane) {
  NORIA_INVARIANT(lane == Lane::fetch || lane == Lane::drain || lane == Lane::peer,
                  "no transfer runs on the " + std::string(to_string(lane)) + " lane");
  return lane == Lane::fetch ? fetch_ : lane == Lane::drain ? drain_ : peer_;
}

// Which of the copies go through the ring; empty when none does. CUDA would copy from or to pageable memory too,
// through a buffer of its own and without overlap: silently slow, so that is a mistake here.
std::vector<bool> CudaBackend::staged_copies(const CopyLane& lane, const Transfer& transfer) const {
  std::vector<bool> staged;
  std::lock_guard lock(mutex_);
  if (lane.kind == cudaMemcpyDeviceToDevice) {  // no home in it
    opened_.check(transfer);
    return staged;
  }
  for (std::size_t i = 0; i < transfer.copies.size(); ++i) {
    const CopySpan& copy = transfer.copies[i];
    const std::byte* home = lane.kind == cudaMemcpyHostToDevice ? copy.from : copy.to;
    if (holds(registered_, home, copy.bytes)) continue;
    NORIA_INVARIANT(holds(staged_, home, copy.bytes),
                    "a copy of " + to_string(copy.bytes) + " leaves the registered home");
    staged.resize(transfer.copies.size());
    staged[i] = true;
  }
  return staged;
}

Ticket CudaBackend::submit(const OpLabel& label, Transfer transfer, std::vector<Ticket> waits) {
  CopyLane& lane = copy_lane(label.lane);
  std::vector<bool> staged = staged_copies(lane, transfer);
  auto ticket = std::make_shared<CudaTicket>(label, device_, events_);
  const std::int64_t submitted_ns = now_ns();
  lane.thread.enqueue({[this, &lane, label, ticket, submitted_ns, transfer = std::move(transfer),
                        staged = std::move(staged), waits = std::move(waits)] {
                         try {
                           run(lane, label, transfer, staged, waits, ticket, submitted_ns);
                         } catch (...) {
                           ticket->fail(std::current_exception());
                         }
                       },
                       [ticket](std::exception_ptr error) { ticket->fail(std::move(error)); }});
  return ticket;
}

void CudaBackend::run(CopyLane& lane, const OpLabel& label, const Transfer& transfer, const std::vector<bool>& staged,
                      const std::vector<Ticket>& waits, const std::shared_ptr<CudaTicket>& ticket,
                      std::int64_t submitted_ns) {
  use_device(device_);
  FollowedOp op{label, submitted_ns, {}, 0, ticket, transfer.bytes()};
  for (const Ticket& wait : waits) {
    lane.thread.await_issued(wait);
    op.waits.push_back({wait, now_ns()});
    hold_back(lane.stream, wait);
  }
  lane.delays.sleep(label.verb);
  op.begun_ns = now_ns();
  if (lane.kind == cudaMemcpyDeviceToDevice) {
    links_.copy(transfer.copies, lane.stream);
  } else {
    copy(lane, transfer, staged);
  }
  for (const auto& [memory, bytes] : transfer.poison) {
    check(cudaMemsetAsync(memory, 0xFF, static_cast<std::size_t>(bytes.count), lane.stream), "cudaMemsetAsync", device_,
          bytes);
  }
  lane.delays.sleep();
  lane.follower.follow(std::move(op));
  ticket->record(lane.stream);  // last: a callback on this thread may release the backend itself
}

void CudaBackend::copy(CopyLane& lane, const Transfer& transfer, const std::vector<bool>& staged) {
  RingLink link(lane, device_);
  try {
    for (std::size_t i = 0; i < transfer.copies.size(); ++i) {
      const CopySpan& span = transfer.copies[i];
      if (staged.empty() || !staged[i]) {
        link.copy(span.to, span.from, span.bytes);
      } else if (lane.kind == cudaMemcpyHostToDevice) {
        lane.ring->carry_down(span, link);
      } else {
        lane.ring->carry_up(span, link);
      }
    }
    // Down, the ticket's event says when the device has it all; the pieces may still be on the link.
    if (!staged.empty() && lane.kind == cudaMemcpyDeviceToHost) lane.ring->land(link);
  } catch (...) {
    if (!staged.empty()) lane.ring->give_up();  // the next op must not land what this one carried
    throw;
  }
}

// ---- ops of the caller's ----

CudaTicket& CudaBackend::as_cuda_ticket(const Ticket& ticket) const {
  auto* on_device = dynamic_cast<CudaTicket*>(ticket.get());
  NORIA_INVARIANT(on_device != nullptr, name() + " gives only tickets that it opened");
  return *on_device;
}

static_assert(sizeof(cudaStream_t) == sizeof(Stream));

static cudaStream_t native(Stream stream) {
  static const bool same_value = kDefaultStream == static_cast<Stream>(cudaStreamLegacy);
  NORIA_INVARIANT(same_value, "kDefaultStream is no longer cudaStreamLegacy");
  return static_cast<cudaStream_t>(stream == nullptr ? kDefaultStream : stream);
}

LaneFollower& CudaBackend::follower_of(Lane lane) {
  return lane == Lane::collect ? collect_follower_ : compute_follower_;
}

Ticket CudaBackend::open(const OpLabel& label, Bytes bytes) {
  return std::make_shared<CudaTicket>(label, device_, events_, bytes);
}

void CudaBackend::give(const Ticket& ticket, Stream stream) {
  CudaTicket& on_device = as_cuda_ticket(ticket);
  try {
    OnDevice on(device_);
    follower_of(ticket->label.lane).follow({ticket->label, 0, {}, on_device.opened_ns(), ticket, on_device.bytes()});
    on_device.record(native(stream));
  } catch (...) {
    on_device.fail(std::current_exception());  // nobody may wait for ever; the caller hears it too
    throw;
  }
}

void CudaBackend::give_failed(const Ticket& ticket, std::exception_ptr error) {
  as_cuda_ticket(ticket).fail(std::move(error));
}

void CudaBackend::wait(const std::vector<Ticket>& tickets, Stream stream, const OpLabel& waiter) {
  const cudaStream_t waiting = native(stream);
  FollowedOp op{waiter, now_ns(), {}, 0, nullptr, {}};
  OnDevice on(device_);
  for (const Ticket& ticket : tickets) {
    ticket->wait_issued();
    op.waits.push_back({ticket, now_ns()});
    hold_back(waiting, ticket);
  }
  follower_of(waiter.lane).follow(std::move(op));
  if (stream == nullptr) {  // Note [The null stream]: the caller waits too
    for (const Ticket& ticket : tickets) ticket->wait_passed();
    compute_delays_.sleep(waiter.verb);
  } else {
    hold_compute(waiting, waiter.verb);
  }
}

// The stream is held where kernels were built, so that the caller runs ahead of it as in real life; else the caller is.
void CudaBackend::hold_compute([[maybe_unused]] cudaStream_t stream, Verb verb) {
#ifdef NORIA_HAVE_KERNELS
  const std::int64_t us = compute_delays_.next_us() + compute_delays_.hold_us(verb);
  if (us == 0) return;
  hold_stream(stream, us);
  check(cudaGetLastError(), "hold_stream", device_);
#else
  compute_delays_.sleep(verb);
#endif
}

// ---- the end ----

void CudaBackend::idle() {
  for (CopyLane* lane : copy_lanes()) lane->thread.idle();
  for (CopyLane* lane : copy_lanes()) lane->follower.idle();
}

void CudaBackend::close() {
  if (fetch_.thread.is_forked()) return;
  std::lock_guard lock(close_mutex_);
  if (std::exchange(closed_, true)) return;
  for (CopyLane* lane : copy_lanes()) lane->thread.close();
  // What was queued on the device is finished, whatever goes wrong on the way; the first failure is reported.
  cudaError_t first = cudaSuccess;
  auto attempt = [&first](cudaError_t error) {
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();
    if (first == cudaSuccess) first = error;
  };
  for (CopyLane* lane : copy_lanes()) {
    attempt(cudaStreamSynchronize(lane->stream));
    lane->follower.idle();
    lane->follower.close();
  }
  attempt(close_opened());
  attempt(links_.close());
  for (CopyLane* lane : copy_lanes()) attempt(cudaStreamDestroy(lane->stream));
  compute_follower_.close();
  collect_follower_.close();
  attempt(free_rings());
  events_->close();
  check(first, "closing the lanes", device_);
}

}  // namespace

std::string cuda_absent_reason() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return std::string("cudaGetDeviceCount failed: ") + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) +
           ")";
  }
  return count > 0 ? "" : "cudaGetDeviceCount finds no device";
}

std::shared_ptr<Backend> make_cuda_backend(const CudaBackendOptions& options) {
  const std::string device = "cuda:" + std::to_string(options.device_index);
  const std::string absent = cuda_absent_reason();
  if (!absent.empty()) throw MachineError("opening " + device + " failed: " + absent);
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount", options.device_index);
  if (options.device_index < 0 || options.device_index >= count) {
    throw MachineError("opening " + device + " failed: this machine has " + std::to_string(count) +
                       " CUDA devices, numbered from 0");
  }
  return std::make_shared<CudaBackend>(options);
}

}  // namespace noria
