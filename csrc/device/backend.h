// Gives the engine its only access to the machine: device memory, lanes that move bytes, and tickets that order them.
//
// Units: bytes, microseconds.
// Ownership: a backend owns its lane threads, streams and events. The caller owns the device memory that it allocates,
//   and returns it with `free`. `close()` may wait and throw. The destructor closes a backend that was left open,
//   because a lane may still be writing; it swallows errors.
// Order: each lane passes its ops in the order of submission. Only tickets order ops of different lanes.
// Threads: any thread may call every member. No member takes the GIL. Lane threads call no member, but one may release
//   the last owner. A forked child has no lanes: ops submitted there fail, and closing does nothing.
//
// Note [Two meanings of a ticket]. A ticket goes open -> issued -> passed (or failed). On the host, issued and passed
// are the same moment. On a device, *issued* means that the event has been recorded on its stream, so a stream may now
// wait for it. On CUDA a wait on an event that was never recorded passes silently. So every wait first waits, on the
// host, for issued. What runs on the host, such as an update, waits for passed.
//
// Note [The calling thread]. If the calling thread itself computes (device/stream.h), CUDA's default stream stands for
// it: `give` records there. `wait` makes that stream wait, and blocks the thread too.
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
#include "device/pace.h"
#include "device/stream.h"

namespace noria {

class UpdateTime;  // device/update_time.h

namespace cuda {
struct Runtime;  // device/cuda_runtime.h
}

/// Names the op that a ticket, a span or a stall belongs to.
struct OpLabel {
  OpId op;
  Lane lane = Lane::compute;
  Verb verb = Verb::forward;
  UnitId unit;
};

/// Marks a point in a lane. The giver and all waiters share it.
class TicketState {
 public:
  explicit TicketState(OpLabel label) : label(label) {}
  virtual ~TicketState() = default;
  TicketState(const TicketState&) = delete;  // a ticket is shared, never copied
  TicketState& operator=(const TicketState&) = delete;

  const OpLabel label;

  /// Returns true if `wait_passed` would not block: the ticket has passed or failed.
  virtual bool passed() const = 0;
  /// Blocks the calling host thread until the point is passed. Throws the giver's failure.
  virtual void wait_passed() = 0;
  /// Blocks until the ticket is issued (see the Note). Throws the giver's failure if it failed before that.
  virtual void wait_issued() = 0;
  /// Calls `callback` once the ticket is issued or failed: on the giver's thread, or at once if that has happened
  /// already.
  virtual void when_issued(std::function<void()> callback) = 0;
};
using Ticket = std::shared_ptr<TicketState>;

/// Waits for all tickets, even if some fail. Then throws the first failure.
void wait_for_all(const std::vector<Ticket>& tickets);
/// Returns why the op of this ticket has failed; empty if it has not, or not yet, or if there is no ticket.
std::string why_failed(const Ticket& ticket);

struct CopySpan {
  std::byte* to;
  const std::byte* from;
  Bytes bytes;
  int link = 0;  // of the peer lane: copies over different links may run in parallel
};

/// Describes one op of the fetch, drain or peer lane: copies, in order on each link, then fills. Fills write 0xFF,
/// which is NaN in every float format.
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
  std::map<Verb, std::int64_t> busy_us_by_verb;              // the part of `busy_us` that finished ops took
};

/// Describes device memory to the other processes on this machine that may open it.
struct SharedMemory {
  Bytes bytes;
  int fd = -1;                         // HostBackend: a memfd. A process that receives it owns its own copy
  std::array<std::byte, 64> handle{};  // CudaBackend: a cudaIpcMemHandle_t
};

/// Says what touches a range of the home besides the host: only the copy engines, or the device's kernels too.
enum class HomeUse : std::uint8_t { copies, device };

class Backend : public Living<Backend> {
 public:
  virtual ~Backend() = default;
  Backend() = default;
  Backend(const Backend&) = delete;  // owns threads
  Backend& operator=(const Backend&) = delete;

  virtual std::string name() const = 0;  // "host", "cuda:1"

  // ---- memory ----
  /// Returns device memory, aligned to 2 MiB or to the device's own granularity. Throws MachineError if `capacity` or
  /// the device is exhausted; then nothing is taken.
  virtual std::byte* allocate(Bytes bytes) = 0;
  virtual void free(std::byte* memory) = 0;
  /// Like `allocate`, but other processes may open the memory. It counts in `allocated` too, and is returned with
  /// `free`, but only after those processes have closed it.
  virtual std::byte* allocate_shared(Bytes bytes) = 0;
  /// Returns what another process needs to open the memory. This backend keeps the descriptor until `free`.
  virtual SharedMemory shared(std::byte* memory) const = 0;
  /// Opens the device memory of another process, for copies of the peer lane. It does not count in `allocated`. The
  /// backend keeps its own mapping; the caller keeps `told.fd`. Throws MachineError if the machine cannot open it.
  virtual std::byte* open_shared(const SharedMemory& told) = 0;
  /// Tells the backend that no process uses this range of memory from `allocate_shared` any more. Returns how many
  /// bytes the device gets back before `free`: 0 if it takes back only whole allocations. Pages that the range covers
  /// in part do not count. Call it at most once for each range.
  virtual Bytes discard_shared(std::byte* /*memory*/, Bytes /*offset*/, Bytes /*bytes*/) { return {}; }
  /// Closes memory that `open_shared` opened. `close` closes what is still open; afterwards this does nothing.
  virtual void close_shared(std::byte* memory) = 0;
  virtual Bytes allocated() const = 0;
  virtual Bytes capacity() const = 0;
  virtual std::int64_t num_allocations() const = 0;  // ever made: a steady state makes none
  virtual std::int64_t num_events() const = 0;       // ever made; always 0 on the host

  /// Pins host memory in one registration, so that the copy engines reach it. Does nothing on the host. Throws
  /// MachineError if the machine refuses to pin memory for the device; then nothing is registered.
  ///
  /// If the machine refuses to pin a range for copies alone, the backend stages it and returns the reason (else an
  /// empty string). Transfers of a staged range go in pieces through a small pinned ring. Their order and tickets stay
  /// the same, but they are only as fast as the copies of one host thread.
  virtual std::string register_home(std::byte* memory, Bytes bytes, HomeUse use) = 0;
  virtual void unregister_home(std::byte* memory) = 0;
  /// Returns the address under which the device itself reads home memory (CUDA unified addressing). Null if it is
  /// staged.
  virtual std::byte* device_address(std::byte* home_memory) const = 0;
  /// Returns the size of the rings in host memory: 0 before a range is staged, then constant until `close`.
  virtual Bytes staging_bytes() const { return {}; }
  /// Returns for example "0000:3B:00.0"; empty if the device is the host.
  virtual std::string pci_bus_id() const { return {}; }

  // ---- kernels ----
  /// Returns why the device cannot run noria's kernels (kernels/update.cu); empty if it can. May load them.
  virtual std::string kernels_absent() { return "the device is the host"; }
  /// Launches a kernel by name on a stream, for `num_threads` elements. `parameters` point to its arguments, which are
  /// copied. Throws MachineError if that fails.
  virtual void launch(const std::string& name, std::int64_t num_threads, const std::vector<void*>& parameters,
                      Stream stream);

  // ---- lanes ----
  /// Queues a transfer on the fetch, drain or peer lane, after `waits`. Does not synchronize. If a wait fails, the
  /// transfer is skipped and its own ticket fails with the same error. On the peer lane, exactly one side of each copy
  /// lies in memory that `open_shared` returned.
  virtual Ticket submit(const OpLabel& label, Transfer transfer, std::vector<Ticket> waits) = 0;

  /// Opens an op of the compute or collect lane. The caller runs such ops, and gives the ticket when its kernels are
  /// launched. `bytes`: how much the op moves, for the statistics.
  virtual Ticket open(const OpLabel& label, Bytes bytes = {}) = 0;
  virtual void give(const Ticket& ticket, Stream stream) = 0;
  /// Gives the ticket as failed, so that no lane waits for ever for a visit that raised.
  virtual void give_failed(const Ticket& ticket, std::exception_ptr error) = 0;
  /// Makes `stream` wait for `tickets`, and blocks at most until each is issued. If the calling thread computes, blocks
  /// until they are passed. Throws the failure of a ticket that has failed already.
  virtual void wait(const std::vector<Ticket>& tickets, Stream stream, const OpLabel& waiter) = 0;

  /// Blocks until the fetch, drain and peer lanes are empty. Does not throw the failures of ops (their tickets carry
  /// them).
  virtual void idle() = 0;
  /// Stops the lanes and joins their threads. An op at work is finished; ops that wait, are queued or come
  /// later fail. Idempotent.
  virtual void close() = 0;

  // ---- what happened ----
  /// Returns the numbers of a lane, which are complete when the lane is idle. An opened op is busy from the end of its
  /// first waits until it is given, except while it waits in between. The times of a device come from its own clock.
  /// They are looked up in this call, which also adds the spans to the trace.
  virtual LaneStats stats(Lane lane) const = 0;
  /// From now on `counted` is as `stats`, but leaves out ops before `first`, even if their times become known later.
  virtual void begin_counting(OpId first) = 0;
  virtual LaneStats counted(Lane lane) const = 0;
  /// Reports to `update_time`, from now on, when the compute lane works.
  virtual void set_update_time(std::shared_ptr<UpdateTime> update_time) = 0;
  /// From now on the spans of all ops but those of the user's loop go to `trace` (null: nowhere). A device's ops come
  /// when their times are looked up.
  virtual void set_trace(std::shared_ptr<Trace> trace) = 0;
  /// Returns true if work launched on this stream is recorded for a CUDA graph, and not run.
  virtual bool is_captured(Stream /*stream*/) const { return false; }
  /// Returns true if a device reads registered memory by itself. A forked child must not share such memory, because
  /// copy-on-write would move pages under a running transfer.
  virtual bool pins() const = 0;
  /// Returns true if vacated memory must be overwritten (the hostile setting).
  virtual bool poisons() const = 0;
};

struct HostBackendOptions {
  Bytes capacity;  // the cap on device memory
  std::shared_ptr<Pace> pace = std::make_shared<Pace>();
};

std::shared_ptr<Backend> make_host_backend(const HostBackendOptions& options);

struct CudaBackendOptions {
  int device_index = 0;
  Bytes capacity;
  std::shared_ptr<Pace> pace = std::make_shared<Pace>();
  // The largest copy on the fetch or drain lane. Between two copies a copy engine can serve others, such as the user's.
  Bytes copy_piece{std::int64_t{32} << 20};
  // The ring of the fetch lane and of the drain lane, if home memory must be staged. One piece is filled while others
  // are on the link.
  Bytes staging_piece{std::int64_t{4} << 20};
  int num_staging_pieces = 4;
  Bytes staging_bytes() const { return staging_piece * (2 * num_staging_pieces); }  // of both lanes
};

/// Makes a backend on this runtime, or on the one that `Runtime::find` finds. Throws MachineError
/// that says what is missing.
std::shared_ptr<Backend> make_cuda_backend(const CudaBackendOptions& options,
                                           const std::shared_ptr<const cuda::Runtime>& runtime = nullptr);

/// Returns why this process has no CUDA runtime or finds no device; empty if it has both.
std::string cuda_absent_reason(const std::shared_ptr<const cuda::Runtime>& runtime = nullptr);

}  // namespace noria
