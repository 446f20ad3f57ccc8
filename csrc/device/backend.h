// The only door to the machine: device memory, lanes that move bytes, and tickets that order them.
//
// Units: bytes; bandwidth in GiB/s, latency and delays in microseconds.
// Ownership: a backend owns its lane threads, streams and events; device memory belongs to whoever allocated it and is
//   given back with `free`. `close()` may wait and throw; the destructor closes a backend that was left open, because
//   a lane may be writing, and then swallows what fails.
// Order: each lane passes its ops in the order of submission. Between lanes nothing is ordered but by tickets.
// Threads: every member may be called from any thread. No member takes the GIL; none is called by a lane thread.
//   In a forked child the lanes do not exist: ops submitted there fail, and closing does nothing.
//
// Note [Two meanings of a ticket]. A ticket goes open -> issued -> passed (or failed). On the host, issued and passed
// are one. On a device, *issued* means that the event has been recorded on its stream, so a stream may now wait for it;
// waiting on an event that was never recorded passes silently on CUDA, which is why every wait first waits, on the
// host, for issued. Host lanes threads wait for passed.
//
// Note [The null stream]. Torch's default CUDA stream has the native handle null, and null here means the calling
// thread. The CUDA backend therefore takes null for both at once: `give` records on the device's default stream, `wait`
// makes that stream wait and blocks the calling thread too. That is always right and overlaps nothing; whoever means
// the default stream alone passes kDefaultStream.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/ids.h"
#include "base/living.h"
#include "base/trace.h"
#include "base/words.h"

namespace noria {

class UpdateTime;  // device/update_time.h

namespace cuda {
struct Runtime;  // device/cuda_runtime.h
}

/// Which op a ticket, a span or a stall belongs to.
struct OpLabel {
  OpId op;
  Lane lane = Lane::compute;
  Verb verb = Verb::forward;
  UnitId unit;
};

/// A point in a lane. Shared by whoever gives it and all who wait for it.
class TicketState {
 public:
  explicit TicketState(OpLabel label) : label(label) {}
  virtual ~TicketState() = default;
  TicketState(const TicketState&) = delete;  // identity is the point of it
  TicketState& operator=(const TicketState&) = delete;

  const OpLabel label;

  /// True once `wait_passed` would not block: passed, or failed.
  virtual bool passed() const = 0;
  /// Blocks the calling host thread until the point is passed; throws the giver's failure.
  virtual void wait_passed() = 0;
  /// Blocks until the ticket is issued (see the Note); throws the giver's failure if it failed before that.
  virtual void wait_issued() = 0;
  /// Calls back once the ticket is issued or failed: on the giver's thread, or at once if it is already.
  virtual void when_issued(std::function<void()> callback) = 0;
};
using Ticket = std::shared_ptr<TicketState>;

/// Waits for all of them, whatever fails; then throws the first failure.
void wait_for_all(const std::vector<Ticket>& tickets);

/// The compute queue that the caller uses now: a cudaStream_t, a compute lane of a HostBackend, or null for "the
/// calling thread itself computes, and has finished when it says so" (but see Note [The null stream]).
using Stream = void*;
/// The device's own default stream, whose native handle is null: the value of cudaStreamLegacy.
inline const Stream kDefaultStream = reinterpret_cast<Stream>(std::uintptr_t{1});  // NOLINT(performance-no-int-to-ptr)

struct CopySpan {
  std::byte* to;
  const std::byte* from;
  Bytes bytes;
  int link = 0;  // of the peer lane: copies over different links go side by side
};

/// What one op on the fetch, drain or peer lane does: copies, in order on each link, then fills (0xFF: NaN in every
/// float format).
struct Transfer {
  std::vector<CopySpan> copies;
  std::vector<std::pair<std::byte*, Bytes>> poison;
  Bytes bytes() const;
};

struct LaneStats {
  std::int64_t busy_us = 0;
  std::int64_t num_ops = 0;
  Bytes bytes;
  std::map<std::pair<Verb, Verb>, std::int64_t> stalled_us;  // (giver, waiter) -> time lost
  std::map<Verb, std::int64_t> busy_us_by_verb;              // of `busy_us`, what is done
};

/// Device memory that other processes on this machine may open: what they are told.
struct SharedMemory {
  Bytes bytes;
  int fd = -1;                         // HostBackend: of a memfd. Whoever gets it from another process owns that copy
  std::array<std::byte, 64> handle{};  // CudaBackend: a cudaIpcMemHandle_t
};

/// Who touches a range of the home besides the host: the copy engines alone, or the device's own kernels too.
enum class HomeUse : std::uint8_t { copies, device };

class Backend : public Living<Backend> {
 public:
  virtual ~Backend() = default;
  Backend() = default;
  Backend(const Backend&) = delete;  // owns threads
  Backend& operator=(const Backend&) = delete;

  virtual std::string name() const = 0;  // "host", "cuda:1"

  // ---- memory ----
  /// Device memory, aligned to 2 MiB or the device's own granularity. Throws MachineError when `capacity` or the
  /// device is exhausted; nothing is taken then.
  virtual std::byte* allocate(Bytes bytes) = 0;
  virtual void free(std::byte* memory) = 0;
  /// As `allocate`, of memory that other processes may open; counted and given back (`free`) alike, but only after
  /// whoever opened it has closed it.
  virtual std::byte* allocate_shared(Bytes bytes) = 0;
  /// What another process needs to open it. The descriptor stays this backend's, until `free`.
  virtual SharedMemory shared(std::byte* memory) const = 0;
  /// Memory of another process's device, for copies of the peer lane. Not in `allocated`. Keeps its own mapping:
  /// `told.fd` stays the caller's. Throws MachineError when the machine cannot open it.
  virtual std::byte* open_shared(const SharedMemory& told) = 0;
  /// Nobody uses this range of such memory any more. Returns what the device has back of it, before `free`: nothing
  /// where memory is given back whole only, and what of a page others still use. Each range once.
  virtual Bytes discard_shared(std::byte* /*memory*/, Bytes /*offset*/, Bytes /*bytes*/) { return {}; }
  /// What is still open at `close` is closed there; after that this does nothing.
  virtual void close_shared(std::byte* memory) = 0;
  virtual Bytes allocated() const = 0;
  virtual Bytes capacity() const = 0;
  virtual std::int64_t num_allocations() const = 0;  // ever made: a steady state makes none
  virtual std::int64_t num_events() const = 0;       // likewise; always 0 on the host

  /// Makes host memory reachable by the copy engines: pins it, in one registration. No-op on the host. Where the
  /// machine refuses to pin, a range for copies alone is staged, and the reason returned (else nothing): its transfers
  /// go in pieces through a small pinned ring, in the same order and under the same tickets, but at the pace of one
  /// host thread's copies. A range for the device is refused then: throws MachineError, and nothing is registered.
  virtual std::string register_home(std::byte* memory, Bytes bytes, HomeUse use) = 0;
  virtual void unregister_home(std::byte* memory) = 0;
  /// The address under which the device itself reads home memory (CUDA unified addressing); null where it is staged.
  virtual std::byte* device_address(std::byte* home_memory) const = 0;
  /// Host memory of the ring: none before a range is staged, then the same until `close`.
  virtual Bytes staging_bytes() const { return {}; }
  /// "0000:3B:00.0"; empty where the device is the host.
  virtual std::string pci_bus_id() const { return {}; }

  // ---- lanes ----
  /// Queues a transfer on the fetch, drain or peer lane, after `waits`. Does not synchronize. If a wait fails, the
  /// transfer is not done and its own ticket fails with the same error. On the peer lane, one side of each copy lies
  /// in memory that `open_shared` gave, and the other does not.
  virtual Ticket submit(const OpLabel& label, Transfer transfer, std::vector<Ticket> waits) = 0;

  /// Ops of the compute and collect lanes are the caller's: opened here, given when the caller's kernels have been
  /// launched. `bytes`: what the op moves, for the numbers.
  virtual Ticket open(const OpLabel& label, Bytes bytes = {}) = 0;
  virtual void give(const Ticket& ticket, Stream stream) = 0;
  /// Gives the ticket as failed, so that no lane waits for ever on a visit that raised.
  virtual void give_failed(const Ticket& ticket, std::exception_ptr error) = 0;
  /// Makes `stream` wait for `tickets` (null stream: blocks the calling thread until they are passed). Blocks the
  /// calling thread only until each is issued. Throws the failure of a ticket known to have failed.
  virtual void wait(const std::vector<Ticket>& tickets, Stream stream, const OpLabel& waiter) = 0;

  /// Blocks until the fetch, drain and peer lanes are empty. Does not throw ops' failures (their tickets carry them).
  virtual void idle() = 0;
  /// Stops the lanes and joins their threads; the running op is finished, queued ops and later ones fail. Idempotent.
  virtual void close() = 0;

  // ---- what happened ----
  /// Complete when the lane is idle. An op that was opened is busy from the end of its waits until it is given, but for
  /// what it waits for in between. Of a device the times come from its own clock, and are looked up here; spans, too.
  virtual LaneStats stats(Lane lane) const = 0;
  /// As `stats`, of the ops from this one on, whenever it is learnt what they did.
  virtual void begin_counting(OpId first) = 0;
  virtual LaneStats counted(Lane lane) const = 0;
  /// Told when the compute lane works, from now on.
  virtual void set_update_time(std::shared_ptr<UpdateTime> update_time) = 0;
  /// Spans of fetch, drain, peer and collect ops go here from now on (null: nowhere); compute spans are the caller's
  /// to add.
  virtual void set_trace(std::shared_ptr<Trace> trace) = 0;
  /// True when what is launched on this stream is recorded for a CUDA graph, and not run.
  virtual bool is_captured(Stream /*stream*/) const { return false; }
  /// True when a device reads registered memory by itself: then a forked child must not share it, for copy-on-write
  /// would move pages under a running transfer.
  virtual bool pins() const = 0;
  /// True when vacated memory must be overwritten (the hostile setting).
  virtual bool poisons() const = 0;
};

/// A rate limit of one lane, of the peer lane that of each link, so that overlap can be measured on any machine. 0
/// means unlimited.
struct LaneLimit {
  double bandwidth_gib_s = 0;
  double latency_us = 0;
};

/// The hostile setting: everything that is allowed to happen late, does.
struct Hostility {
  std::uint64_t seed = 0;         // 0: not hostile
  std::int64_t max_delay_us = 0;  // a random delay up to this before and after each lane op, and after compute waits
  std::map<Verb, std::int64_t> hold_us;  // ops of this verb are held back by so much before they run
  bool poison = false;                   // vacated memory is overwritten with 0xFF
  std::int64_t hold_peer_us = 0;         // each op of the peer lane waits this long in addition
};

struct HostBackendOptions {
  Bytes capacity;                    // the cap on device memory
  std::map<Lane, LaneLimit> limits;  // fetch, drain, peer (update's limit is the host optimizer's)
  Hostility hostility;
  /// Of the peer lane, those that are not as its others.
  std::map<int, LaneLimit> links = {};  // NOLINT(readability-redundant-member-init): who lists the others need not
};

std::shared_ptr<Backend> make_host_backend(const HostBackendOptions& options);

struct CudaBackendOptions {
  int device_index = 0;
  Bytes capacity;
  Hostility hostility;
  // No copy of the fetch or drain lane is larger: between two of them a copy engine serves others, such as the user's.
  Bytes copy_piece{std::int64_t{32} << 20};
  // The ring of each copy lane, should there be home memory to stage: one piece is filled while others are on the link.
  Bytes staging_piece{std::int64_t{4} << 20};
  int num_staging_pieces = 4;
  Bytes staging_bytes() const { return staging_piece * (2 * num_staging_pieces); }  // of both lanes
};

/// On this runtime, or on the one that is found. Throws MachineError naming what is missing when this machine has none.
std::shared_ptr<Backend> make_cuda_backend(const CudaBackendOptions& options,
                                           const std::shared_ptr<const cuda::Runtime>& runtime = nullptr);

/// Why `make_cuda_backend` would fail here; empty when it would not.
std::string cuda_absent_reason(const std::shared_ptr<const cuda::Runtime>& runtime = nullptr);

}  // namespace noria
