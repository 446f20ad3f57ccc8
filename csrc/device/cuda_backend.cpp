// Implements device/backend.h on the CUDA runtime (device/cuda_runtime.h).
//
// Ownership: owns a non-blocking stream and a host thread for each copy lane, and pools of events. There is one stream
//   for each lane, because copy engines are per direction and more streams add nothing. Only the peer lane has one
//   stream for each link. The threads never take the GIL.
// Order: a transfer's thread waits on the host until its tickets are issued (event tickets) or passed (host tickets).
//   Then it queues stream waits, copies and the event. Only then is its own ticket issued. So no stream ever has to
//   wait for an event that has not been recorded.
//
// Note [Staged home]. If the driver refuses to pin memory, the device cannot copy it without the host. So a lane's
// thread carries it through a pinned ring (device/staging_ring.h) and keeps the order itself.
//
// Up: a piece arrives behind the same stream waits as any copy, and then the thread writes it to the home. The op's
// event is recorded when everything has landed. So a waiter for *issued* waits that much longer. There is no deadlock,
// because an op waits only for ops that were issued before it.
//
// Down: the thread reads the home once the transfer's tickets are issued. That is enough. The device cannot write such
// memory, so only the host and drains write it, and their tickets are issued after they have written.
//
// Note [Current device]. noria's own threads stay on the device. On any other thread OnDevice sets it for a call, and
// restores it afterwards.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include "base/errors.h"
#include "base/mutex.h"
#include "device/cuda_kernels.h"
#include "device/cuda_links.h"
#include "device/cuda_ticket.h"
#include "device/cuda_times.h"
#include "device/host_lane.h"
#include "device/host_memory.h"
#include "device/lane_ledger.h"
#include "device/opened_memory.h"
#include "device/staging_ring.h"
#include "device/timing.h"

namespace noria {
namespace {

/// Runs on the stream, and delays everything that comes later there. It is a host function and not a kernel, so that
/// holding a stream needs no device code.
void hold_stream(void* held) {
  const std::unique_ptr<std::int64_t> us(static_cast<std::int64_t*>(held));
  sleep_until_ns(now_ns() + *us * 1000);
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(const CudaBackendOptions& options, std::shared_ptr<const cuda::Runtime> runtime);
  ~CudaBackend() override;

  std::string name() const override { return device_.name(); }

  std::byte* allocate(Bytes bytes) override;
  void free(std::byte* memory) override;
  std::byte* allocate_shared(Bytes bytes) override;
  SharedMemory shared(std::byte* memory) const override;
  std::byte* open_shared(const SharedMemory& told) override;
  void close_shared(std::byte* memory) override;
  Bytes allocated() const override;
  Bytes capacity() const override { return options_.capacity; }
  std::int64_t num_allocations() const override;
  std::int64_t num_events() const override { return events_->num_created() + times_.num_events(); }

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

  LaneStats stats(Lane lane) const override {
    times_.poll();
    return ledger_.stats(lane);
  }
  void begin_counting(OpId first) override { ledger_.begin_counting(first); }
  LaneStats counted(Lane lane) const override {
    times_.poll();
    return ledger_.counted(lane);
  }
  void set_update_time(std::shared_ptr<UpdateTime> time) override { ledger_.set_update_time(std::move(time)); }
  void set_trace(std::shared_ptr<Trace> trace) override { ledger_.set_trace(std::move(trace)); }
  std::string kernels_absent() override;
  void launch(const std::string& name, std::int64_t num_threads, const std::vector<void*>& parameters,
              Stream stream) override;
  bool is_captured(Stream stream) const override;
  bool pins() const override { return true; }
  bool poisons() const override { return options_.pace->poisons(); }

 private:
  struct CopyLane {
    CopyLane(Lane lane, cuda::CopyKind kind) : lane(lane), kind(kind), thread(std::string(to_string(lane))) {}
    const Lane lane;
    const cuda::CopyKind kind;
    cuda::StreamHandle stream = nullptr;
    std::unique_ptr<StagingRing> ring;           // Note [Staged home]; made before the first transfer that needs it
    std::vector<cuda::EventHandle> ring_events;  // by piece
    HostLane thread;                             // last: destroyed before what it uses
  };
  class RingLink;

  std::array<CopyLane*, 3> copy_lanes() { return {&fetch_, &drain_, &peer_}; }
  CopyLane& copy_lane(Lane lane);
  std::byte* take(Bytes bytes, bool for_others);
  void run(CopyLane& lane, const OpLabel& label, const Transfer& transfer, const std::vector<bool>& staged,
           const std::vector<Ticket>& waits, const std::shared_ptr<CudaTicket>& ticket, std::int64_t submitted_ns);
  void carry_out(CopyLane& lane, TimedOp op, const Transfer& transfer, const std::vector<bool>& staged,
                 const std::shared_ptr<CudaTicket>& ticket);
  void copy(CopyLane& lane, const Transfer& transfer, const std::vector<bool>& staged);
  std::vector<bool> staged_copies(const CopyLane& lane, const Transfer& transfer) const;
  void make_rings() NORIA_REQUIRES(mutex_);
  cuda::Error free_rings() NORIA_REQUIRES(mutex_);
  cuda::Error close_opened();
  CudaTicket& as_cuda_ticket(const Ticket& ticket) const;
  void hold_compute(cuda::StreamHandle stream, Verb verb);

  const CudaBackendOptions options_;
  const CudaDevice device_;
  CudaKernels kernels_;
  const std::shared_ptr<EventPool> events_;
  LaneLedger ledger_;
  mutable CudaTimes times_;
  CopyLane fetch_, drain_, peer_;
  CudaLinks links_;
  Mutex close_mutex_;
  bool closed_ NORIA_GUARDED_BY(close_mutex_) = false;

  mutable Mutex mutex_;
  struct Allocation {
    Bytes bytes;
    bool for_others = false;
  };
  std::map<std::byte*, Allocation> allocations_ NORIA_GUARDED_BY(mutex_);
  OpenedMemory opened_ NORIA_GUARDED_BY(mutex_);
  bool opened_closed_ NORIA_GUARDED_BY(mutex_) = false;
  struct Registered {
    Bytes bytes;
    std::byte* on_device = nullptr;  // asked for once: interior addresses are offsets from it
  };
  std::map<const std::byte*, Registered> registered_ NORIA_GUARDED_BY(mutex_);
  std::map<const std::byte*, Bytes> staged_ NORIA_GUARDED_BY(mutex_);
  std::byte* ring_memory_ NORIA_GUARDED_BY(mutex_) = nullptr;  // of both lanes, in one registration
  Bytes allocated_ NORIA_GUARDED_BY(mutex_);
  std::int64_t num_allocations_ NORIA_GUARDED_BY(mutex_) = 0;
};

/// Moves pieces of the ring for a lane's thread.
class CudaBackend::RingLink final : public StagingRing::Link {
 public:
  RingLink(CopyLane& lane, const CudaDevice& device) : lane_(lane), device_(device) {}
  void copy(std::byte* to, const std::byte* from, Bytes bytes) override {
    device_.check(device_->MemcpyAsync(to, from, static_cast<std::size_t>(bytes.count), lane_.kind, lane_.stream),
                  "cudaMemcpyAsync", bytes);
  }
  void mark(std::size_t piece) override {
    device_.check(device_->EventRecord(lane_.ring_events.at(piece), lane_.stream), "cudaEventRecord");
  }
  void await(std::size_t piece) override {
    device_.check(device_->EventSynchronize(lane_.ring_events.at(piece)), "cudaEventSynchronize");
  }

 private:
  CopyLane& lane_;
  const CudaDevice& device_;
};

Bytes bytes_of(Bytes bytes) { return bytes; }
template <class Range>
Bytes bytes_of(const Range& range) {
  return range.bytes;
}

/// Returns the range that holds all of [memory, memory + bytes), or the end.
template <class Ranges>
auto holder(const Ranges& ranges, const std::byte* memory, Bytes bytes) {
  auto range = ranges.upper_bound(memory);
  if (range == ranges.begin()) return ranges.end();
  --range;
  return memory + bytes.count <= range->first + bytes_of(range->second).count ? range : ranges.end();
}

CudaBackend::CudaBackend(const CudaBackendOptions& options, std::shared_ptr<const cuda::Runtime> runtime)
    : options_(options),
      device_(std::move(runtime), options.device_index),
      kernels_(device_),
      events_(std::make_shared<EventPool>(device_)),
      times_(device_, ledger_),
      fetch_(Lane::fetch, cuda::kHostToDevice),
      drain_(Lane::drain, cuda::kDeviceToHost),
      // Not cudaMemcpyDefault: given an address of the home, it would detect host memory and copy through the host.
      peer_(Lane::peer, cuda::kDeviceToDevice),
      links_(device_, events_) {
  OnDevice on(device_);
  cuda::Error error = cuda::kSuccess;
  for (CopyLane* lane : copy_lanes()) {
    if (error == cuda::kSuccess) error = device_->StreamCreateWithFlags(&lane->stream, cuda::kStreamNonBlocking);
  }
  if (error == cuda::kSuccess) {
    times_.tie(fetch_.stream);
    return;
  }
  for (CopyLane* lane : copy_lanes()) {
    if (lane->stream != nullptr) (void)device_->StreamDestroy(lane->stream);
  }
  device_.check(error, "cudaStreamCreateWithFlags");
}

CudaBackend::~CudaBackend() {
  try {
    close();
  } catch (...) {  // NOLINT(bugprone-empty-catch): a caller that needs the error calls close()
  }
}

// ---- memory ----

std::byte* CudaBackend::allocate(Bytes bytes) { return take(bytes, false); }

std::byte* CudaBackend::allocate_shared(Bytes bytes) { return take(bytes, true); }

std::byte* CudaBackend::take(Bytes bytes, bool for_others) {
  NORIA_INVARIANT(bytes.count > 0, "an allocation of nothing");
  const MutexLock lock(mutex_);
  OnDevice on(device_);
  const std::string policy =
      " under a capacity of " + to_string(options_.capacity) + " (" + to_string(allocated_) + " are taken)";
  if (allocated_ + bytes > options_.capacity) {
    throw MachineError("allocating " + to_string(bytes) + " on " + name() + " failed" + policy);
  }
  // Uses plain cudaMalloc, because a pipeline neighbour can open such memory (cudaIpcGetMemHandle). Memory of a
  // stream-ordered pool or of an expandable segment cannot be opened. The neighbour opens the whole block that the
  // memory is cut from, so shared memory takes whole blocks.
  const Bytes whole = for_others ? align_up(bytes, kDeviceAlignment) : bytes;
  void* memory = nullptr;
  const cuda::Error error = device_->Malloc(&memory, static_cast<std::size_t>(whole.count));
  if (error != cuda::kSuccess) {
    std::size_t free = 0, total = 0;
    std::string found;
    if (device_->MemGetInfo(&free, &total) == cuda::kSuccess) {
      found = " with " + to_string(Bytes{static_cast<std::int64_t>(free)}) + " free of " +
              to_string(Bytes{static_cast<std::int64_t>(total)});
    }
    device_.fail(error, "cudaMalloc of " + to_string(bytes) + " on " + name() + found + policy);
  }
  auto* device_memory = static_cast<std::byte*>(memory);
  allocations_.emplace(device_memory, Allocation{bytes, for_others});
  allocated_ += bytes;
  ++num_allocations_;
  return device_memory;
}

void CudaBackend::free(std::byte* memory) {
  if (fetch_.thread.is_forked()) return;
  const MutexLock lock(mutex_);
  const auto found = allocations_.find(memory);
  NORIA_INVARIANT(found != allocations_.end(), "freed what " + name() + " did not allocate");
  const Bytes bytes = found->second.bytes;
  allocated_ -= bytes;
  allocations_.erase(found);
  OnDevice on(device_);
  device_.check(device_->Free(memory), "cudaFree", bytes);
}

SharedMemory CudaBackend::shared(std::byte* memory) const {
  const MutexLock lock(mutex_);
  const auto found = allocations_.find(memory);
  NORIA_INVARIANT(found != allocations_.end() && found->second.for_others, "told of memory that is not shared");
  OnDevice on(device_);
  SharedMemory told{found->second.bytes, -1, {}};
  cuda::IpcHandle handle{};
  device_.check(device_->IpcGetMemHandle(&handle, memory), "cudaIpcGetMemHandle", told.bytes);
  static_assert(sizeof(handle) == sizeof(told.handle));
  std::memcpy(told.handle.data(), &handle, sizeof(handle));
  return told;
}

std::byte* CudaBackend::open_shared(const SharedMemory& told) {
  const MutexLock lock(mutex_);
  OnDevice on(device_);
  cuda::IpcHandle handle{};
  std::memcpy(&handle, told.handle.data(), sizeof(handle));
  void* memory = nullptr;
  device_.check(device_->IpcOpenMemHandle(&memory, handle, cuda::kIpcLazyEnablePeerAccess), "cudaIpcOpenMemHandle",
                told.bytes);
  opened_.add(static_cast<std::byte*>(memory), told.bytes);
  return static_cast<std::byte*>(memory);
}

void CudaBackend::close_shared(std::byte* memory) {
  if (fetch_.thread.is_forked()) return;
  const MutexLock lock(mutex_);
  if (opened_closed_) return;
  const Bytes bytes = opened_.remove(memory);
  OnDevice on(device_);
  device_.check(device_->IpcCloseMemHandle(memory), "cudaIpcCloseMemHandle", bytes);
}

Bytes CudaBackend::allocated() const {
  const MutexLock lock(mutex_);
  return allocated_;
}

std::int64_t CudaBackend::num_allocations() const {
  const MutexLock lock(mutex_);
  return num_allocations_;
}

std::string CudaBackend::register_home(std::byte* memory, Bytes bytes, HomeUse use) {
  OnDevice on(device_);
  // Registers a range in one call, because a copy may not span two registered ranges. The range is mapped, because the
  // device reads held gradients in it. The lock is not held, so that ranges can be registered in parallel.
  const cuda::Error error = device_->HostRegister(memory, static_cast<std::size_t>(bytes.count),
                                                  cuda::kHostRegisterPortable | cuda::kHostRegisterMapped);
  const MutexLock lock(mutex_);
  // Memory that is registered already is noria's mistake, or belongs to other code. That is an error, not a reason to
  // stage.
  if (error == cuda::kSuccess || use == HomeUse::device || error == cuda::kHostMemoryAlreadyRegistered) {
    device_.check(error, "cudaHostRegister", bytes);
    void* on_device = nullptr;
    const cuda::Error unmapped = device_->HostGetDevicePointer(&on_device, memory, 0);
    if (unmapped != cuda::kSuccess) {
      if (device_->HostUnregister(memory) != cuda::kSuccess) device_.forget_error();
      device_.check(unmapped, "cudaHostGetDevicePointer", bytes);
    }
    registered_.emplace(memory, Registered{bytes, static_cast<std::byte*>(on_device)});
    return {};
  }
  device_.forget_error();
  if (ring_memory_ == nullptr) make_rings();
  staged_.emplace(memory, bytes);
  return "cudaHostRegister of " + to_string(bytes) + " on " + name() + " failed: " + device_->GetErrorString(error) +
         " (" + device_->GetErrorName(error) + ")";
}

void CudaBackend::unregister_home(std::byte* memory) {
  if (fetch_.thread.is_forked()) return;
  const MutexLock lock(mutex_);
  if (staged_.erase(memory) > 0) return;
  const auto found = registered_.find(memory);
  NORIA_INVARIANT(found != registered_.end(), "unregistered what " + name() + " had not registered");
  const Bytes bytes = found->second.bytes;
  registered_.erase(found);
  OnDevice on(device_);
  device_.check(device_->HostUnregister(memory), "cudaHostUnregister", bytes);
}

std::byte* CudaBackend::device_address(std::byte* home_memory) const {
  const MutexLock lock(mutex_);
  if (holder(staged_, home_memory, Bytes{1}) != staged_.end()) return nullptr;
  const auto found = holder(registered_, home_memory, Bytes{1});
  NORIA_INVARIANT(found != registered_.end(), "asked for a device address of memory that is not registered");
  return found->second.on_device + (home_memory - found->first);
}

std::string CudaBackend::pci_bus_id() const {
  std::array<char, 32> id{};
  device_.check(device_->DeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), device_.index()),
                "cudaDeviceGetPCIBusId");
  return id.data();
}

Bytes CudaBackend::staging_bytes() const {
  const MutexLock lock(mutex_);
  return ring_memory_ == nullptr ? Bytes{} : options_.staging_bytes();
}

/// The caller holds the mutex, and is on this device.
void CudaBackend::make_rings() {
  const Bytes bytes = options_.staging_bytes();
  std::byte* const memory = map_pages(bytes);
  if (memory == nullptr) {
    throw MachineError("mmap of " + to_string(bytes) + " for the staging ring of " + name() +
                       " failed: " + std::generic_category().message(errno));
  }
  const auto size = static_cast<std::size_t>(bytes.count);
  madvise(memory, size, MADV_DONTFORK);  // advice: a child that inherits it only shares pages that it never uses
  const cuda::Error error = device_->HostRegister(memory, size, cuda::kHostRegisterPortable);
  if (error != cuda::kSuccess) {
    unmap_pages(memory, bytes);
    device_.check(error, "cudaHostRegister for the staging ring", bytes);
  }
  ring_memory_ = memory;
  try {
    std::byte* begin = memory;
    for (CopyLane* lane : {&fetch_, &drain_}) {
      for (int i = 0; i < options_.num_staging_pieces; ++i) lane->ring_events.push_back(events_->take());
      lane->ring = std::make_unique<StagingRing>(begin, options_.staging_piece, options_.num_staging_pieces);
      begin += options_.staging_piece.count * options_.num_staging_pieces;
    }
  } catch (...) {
    if (free_rings() != cuda::kSuccess) device_.forget_error();
    throw;
  }
}

/// The caller holds the mutex, and no lane uses the rings.
cuda::Error CudaBackend::free_rings() {
  for (CopyLane* lane : {&fetch_, &drain_}) {
    for (cuda::EventHandle event : lane->ring_events) events_->give_back(event);
    lane->ring_events.clear();
    lane->ring.reset();
  }
  std::byte* const memory = std::exchange(ring_memory_, nullptr);
  if (memory == nullptr) return cuda::kSuccess;
  const cuda::Error error = device_->HostUnregister(memory);
  unmap_pages(memory, options_.staging_bytes());
  return error;
}

/// Call it after the lanes have ended.
cuda::Error CudaBackend::close_opened() {
  const MutexLock lock(mutex_);
  cuda::Error first = cuda::kSuccess;
  try {
    OnDevice on(device_);
    for (const auto& [memory, bytes] : opened_) {
      const cuda::Error error = device_->IpcCloseMemHandle(memory);
      if (first == cuda::kSuccess) first = error;
    }
  } catch (const MachineError&) {
    first = cuda::kInvalidDevice;
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

// Returns which copies go through the ring; empty if none does. CUDA would also copy from or to pageable memory,
// through a buffer of its own and without overlap. That is slow without any notice, so here it is an error.
std::vector<bool> CudaBackend::staged_copies(const CopyLane& lane, const Transfer& transfer) const {
  std::vector<bool> staged;
  const MutexLock lock(mutex_);
  if (lane.kind == cuda::kDeviceToDevice) {  // no home memory is involved
    opened_.check(transfer);
    return staged;
  }
  for (std::size_t i = 0; i < transfer.copies.size(); ++i) {
    const CopySpan& copy = transfer.copies[i];
    const std::byte* home = lane.kind == cuda::kHostToDevice ? copy.from : copy.to;
    if (holder(registered_, home, copy.bytes) != registered_.end()) continue;
    NORIA_INVARIANT(holder(staged_, home, copy.bytes) != staged_.end(),
                    "a copy of " + to_string(copy.bytes) + " leaves the registered home");
    staged.resize(transfer.copies.size());
    staged[i] = true;
  }
  return staged;
}

Ticket CudaBackend::submit(const OpLabel& label, Transfer transfer, std::vector<Ticket> waits) {
  CopyLane& lane = copy_lane(label.lane);
  // A forked child may have inherited the mutex locked. There the lane abandons the op.
  std::vector<bool> staged = lane.thread.is_forked() ? std::vector<bool>() : staged_copies(lane, transfer);
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
  device_.use_on_own_thread();
  TimedOp op{label, submitted_ns, {}, nullptr, nullptr, transfer.bytes()};
  for (const Ticket& wait : waits) {
    lane.thread.await_issued(wait);
    op.waits.push_back(TimedOp::wait_of(wait));
    hold_back(lane.stream, wait);
  }
  sleep_for_us(options_.pace->before_us(lane.lane, label.verb));
  try {
    carry_out(lane, std::move(op), transfer, staged, ticket);
  } catch (...) {
    // Some of the copies may be queued, and a waiter that hears of the failure may reuse their memory.
    if (device_->StreamSynchronize(lane.stream) != cuda::kSuccess) device_.forget_error();
    throw;
  }
}

void CudaBackend::carry_out(CopyLane& lane, TimedOp op, const Transfer& transfer, const std::vector<bool>& staged,
                            const std::shared_ptr<CudaTicket>& ticket) {
  times_.begin(op, lane.stream);
  if (lane.kind == cuda::kDeviceToDevice) {
    links_.copy(transfer.copies, lane.stream);
  } else {
    copy(lane, transfer, staged);
  }
  for (const auto& [memory, bytes] : transfer.poison) {
    device_.check(device_->MemsetAsync(memory, 0xFF, static_cast<std::size_t>(bytes.count), lane.stream),
                  "cudaMemsetAsync", bytes);
  }
  auto ended = times_.end(std::move(op), lane.stream);
  times_.poll();
  sleep_for_us(options_.pace->after_us(lane.lane));
  ticket->record(lane.stream, std::move(ended));  // last: a callback on this thread may release the backend itself
}

void CudaBackend::copy(CopyLane& lane, const Transfer& transfer, const std::vector<bool>& staged) {
  RingLink link(lane, device_);
  try {
    for (std::size_t i = 0; i < transfer.copies.size(); ++i) {
      const CopySpan& span = transfer.copies[i];
      if (staged.empty() || !staged[i]) {
        for (std::int64_t at = 0; at < span.bytes.count; at += options_.copy_piece.count) {
          link.copy(span.to + at, span.from + at, std::min(options_.copy_piece, span.bytes - Bytes{at}));
        }
      } else if (lane.kind == cuda::kHostToDevice) {
        lane.ring->carry_down(span, link);
      } else {
        lane.ring->carry_up(span, link);
      }
    }
    // Up, the home must hold everything before the event is recorded. Down, that is not needed: the ticket's event says
    // when the device has it all, and the pieces may still be on the link.
    if (!staged.empty() && lane.kind == cuda::kDeviceToHost) lane.ring->land(link);
  } catch (...) {
    if (!staged.empty()) lane.ring->give_up();  // the next op must not land what this one carried
    throw;
  }
}

// ---- ops that callers give ----

CudaTicket& CudaBackend::as_cuda_ticket(const Ticket& ticket) const {
  auto* on_device = dynamic_cast<CudaTicket*>(ticket.get());
  NORIA_INVARIANT(on_device != nullptr, name() + " gives only tickets that it opened");
  return *on_device;
}

static cuda::StreamHandle native(Stream stream) {
  return static_cast<cuda::StreamHandle>((stream.is_calling_thread() ? Stream::of(nullptr) : stream).handle());
}

Ticket CudaBackend::open(const OpLabel& label, Bytes bytes) {
  auto ticket = std::make_shared<CudaTicket>(label, device_, events_, bytes);
  times_.open(label);
  return ticket;
}

void CudaBackend::give(const Ticket& ticket, Stream stream) {
  CudaTicket& on_device = as_cuda_ticket(ticket);
  try {
    OnDevice on(device_);
    auto ended = times_.give(ticket->label, on_device.opened_ns(), on_device.bytes(), native(stream));
    on_device.record(native(stream), std::move(ended));
  } catch (...) {
    on_device.fail(std::current_exception());  // so that no thread waits for ever; the caller gets the error too
    throw;
  }
}

void CudaBackend::give_failed(const Ticket& ticket, std::exception_ptr error) {
  times_.give_up(ticket->label);
  as_cuda_ticket(ticket).fail(std::move(error));
}

void CudaBackend::wait(const std::vector<Ticket>& tickets, Stream stream, const OpLabel& waiter) {
  const cuda::StreamHandle waiting = native(stream);
  TimedOp op{waiter, now_ns(), {}, nullptr, nullptr, {}};
  OnDevice on(device_);
  for (const Ticket& ticket : tickets) {
    ticket->wait_issued();
    op.waits.push_back(TimedOp::wait_of(ticket));
  }
  const auto held_up = times_.pause(waiter, !tickets.empty(), waiting);
  for (const Ticket& ticket : tickets) hold_back(waiting, ticket);
  times_.waits(std::move(op));
  if (stream.is_calling_thread()) {  // Note [The calling thread]
    for (const Ticket& ticket : tickets) ticket->wait_passed();
    sleep_for_us(options_.pace->before_us(Lane::compute, waiter.verb));
  } else {
    hold_compute(waiting, waiter.verb);
  }
  if (held_up) times_.resume(*held_up, waiting);
}

// Holds the stream and not the caller, which runs ahead of the stream as in normal use.
void CudaBackend::hold_compute(cuda::StreamHandle stream, Verb verb) {
  const std::int64_t us = options_.pace->before_us(Lane::compute, verb);
  if (us == 0) return;
  auto held = std::make_unique<std::int64_t>(us);
  device_.check(device_->LaunchHostFunc(stream, &hold_stream, held.get()), "cudaLaunchHostFunc");
  (void)held.release();  // the stream owns it from now on
}

std::string CudaBackend::kernels_absent() {
  OnDevice on(device_);
  return kernels_.absent();
}

void CudaBackend::launch(const std::string& name, std::int64_t num_threads, const std::vector<void*>& parameters,
                         Stream stream) {
  OnDevice on(device_);
  kernels_.launch(name, num_threads, parameters, native(stream));
}

bool CudaBackend::is_captured(Stream stream) const {
  OnDevice on(device_);
  cuda::CaptureStatus status = cuda::kNotCapturing;
  device_.check(device_->StreamIsCapturing(native(stream), &status), "cudaStreamIsCapturing");
  return status != cuda::kNotCapturing;
}

// ---- the end ----

void CudaBackend::idle() {
  if (fetch_.thread.is_forked()) return;
  for (CopyLane* lane : copy_lanes()) lane->thread.idle();
  const MutexLock lock(close_mutex_);
  if (closed_) return;  // the streams are gone
  try {
    const OnDevice on(device_);
    for (CopyLane* lane : copy_lanes()) {
      CudaTicket reached({OpId(), Lane::compute, Verb::user, UnitId()}, device_, events_);
      reached.record(lane->stream);
      reached.wait_passed();
    }
  } catch (const MachineError&) {  // NOLINT(bugprone-empty-catch): tickets carry the failure
  }
  times_.poll();
}

void CudaBackend::close() {
  if (fetch_.thread.is_forked()) return;
  const MutexLock lock(close_mutex_);
  if (std::exchange(closed_, true)) return;
  for (CopyLane* lane : copy_lanes()) lane->thread.close();
  // Finishes what was queued on the device, even if something fails on the way. Reports the first failure.
  cuda::Error first = cuda::kSuccess;
  std::exception_ptr unreached;
  std::optional<OnDevice> on;
  try {
    on.emplace(device_);
  } catch (const MachineError&) {
    unreached = std::current_exception();
  }
  auto attempt = [&](cuda::Error error) {
    if (error == cuda::kSuccess) return;
    device_.forget_error();
    if (first == cuda::kSuccess) first = error;
  };
  for (CopyLane* lane : copy_lanes()) {
    attempt(device_->StreamSynchronize(lane->stream));
  }
  times_.close();
  attempt(close_opened());
  attempt(links_.close());
  for (CopyLane* lane : copy_lanes()) attempt(device_->StreamDestroy(lane->stream));
  {
    const MutexLock rings_lock(mutex_);
    attempt(free_rings());
  }
  events_->close();
  if (unreached) std::rethrow_exception(unreached);
  device_.check(first, "closing the lanes");
}

}  // namespace

std::string cuda_absent_reason(const std::shared_ptr<const cuda::Runtime>& given) {
  std::string absent;
  const auto runtime = given ? given : cuda::Runtime::find(&absent);
  if (!runtime) return absent;
  int count = 0;
  const cuda::Error error = runtime->GetDeviceCount(&count);
  if (error != cuda::kSuccess) {
    (void)runtime->GetLastError();
    return std::string("cudaGetDeviceCount failed: ") + runtime->GetErrorString(error) + " (" +
           runtime->GetErrorName(error) + ")";
  }
  return count > 0 ? "" : "cudaGetDeviceCount finds no device";
}

std::shared_ptr<Backend> make_cuda_backend(const CudaBackendOptions& options,
                                           const std::shared_ptr<const cuda::Runtime>& given) {
  const std::string device = "cuda:" + std::to_string(options.device_index);
  const std::string absent = cuda_absent_reason(given);
  if (!absent.empty()) throw MachineError("opening " + device + " failed: " + absent);
  const auto runtime = given ? given : cuda::Runtime::find();
  int count = 0;
  CudaDevice(runtime, options.device_index).check(runtime->GetDeviceCount(&count), "cudaGetDeviceCount");
  if (options.device_index < 0 || options.device_index >= count) {
    throw MachineError("opening " + device + " failed: this machine has " + std::to_string(count) +
                       " CUDA devices, numbered from 0");
  }
  return std::make_shared<CudaBackend>(options, runtime);
}

}  // namespace noria
