// Acts as a device on a machine without one: real memory under a real cap, real lane threads, real copies.
//
// It is a full backend (layers compute on the CPU), and the strictest place to test everything above it. A slow pace
// (testing/slow_pace.h) delays all that may be late, and limits lanes. Contract: device/backend.h. The CUDA backend
// must pass the same test suite.
//
// Order: if the calling thread computes, it is the compute lane. Then `give` passes the ticket at once, and `wait`
//   blocks until its tickets are passed. A stream of `create_stream` is a thread that behaves like a CUDA stream:
//   `give` and `wait` are queued behind its work and return at once.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>

#include "base/mutex.h"
#include "device/backend.h"
#include "device/host_lane.h"
#include "device/lane_ledger.h"
#include "device/opened_memory.h"
#include "device/timed_lane.h"

namespace noria {

class HostBackend final : public Backend {
 public:
  explicit HostBackend(const HostBackendOptions& options);
  ~HostBackend() override;

  std::string name() const override { return "host"; }

  std::byte* allocate(Bytes bytes) override;
  void free(std::byte* memory) override;
  std::byte* allocate_shared(Bytes bytes) override;
  SharedMemory shared(std::byte* memory) const override;
  Bytes discard_shared(std::byte* memory, Bytes offset, Bytes bytes) override;
  std::byte* open_shared(const SharedMemory& told) override;
  void close_shared(std::byte* memory) override;
  Bytes allocated() const override;
  Bytes capacity() const override { return options_.capacity; }
  std::int64_t num_allocations() const override;
  std::int64_t num_events() const override { return 0; }

  std::string register_home(std::byte*, Bytes, HomeUse) override { return {}; }
  void unregister_home(std::byte*) override {}
  std::byte* device_address(std::byte* home_memory) const override { return home_memory; }

  Ticket submit(const OpLabel& label, Transfer transfer, std::vector<Ticket> waits) override;
  Ticket open(const OpLabel& label, Bytes bytes) override;
  void give(const Ticket& ticket, Stream stream) override;
  void give_failed(const Ticket& ticket, std::exception_ptr error) override;
  void wait(const std::vector<Ticket>& tickets, Stream stream, const OpLabel& waiter) override;

  void idle() override;
  void close() override;

  LaneStats stats(Lane lane) const override { return ledger_.stats(lane); }
  void begin_counting(OpId first) override { ledger_.begin_counting(first); }
  LaneStats counted(Lane lane) const override { return ledger_.counted(lane); }
  void set_update_time(std::shared_ptr<UpdateTime> time) override { ledger_.set_update_time(std::move(time)); }
  void set_trace(std::shared_ptr<Trace> trace) override { ledger_.set_trace(std::move(trace)); }
  bool pins() const override { return false; }
  bool poisons() const override { return options_.pace->poisons(); }

  /// Makes an asynchronous compute stream, which the backend owns.
  Stream create_stream();
  /// Queues work on such a stream. Work that throws breaks the stream: nothing runs on it any more, its tickets fail
  /// with that error, and waiting on it throws.
  void enqueue(Stream stream, std::function<void()> work);

 private:
  struct ComputeStream;
  TimedLane& transfer_lane(Lane lane);
  std::byte* take(Bytes bytes, bool for_others);
  ComputeStream& compute_stream(Stream stream);
  std::optional<OpId> paused(const OpLabel& waiter, std::int64_t at_ns, bool has_waits);
  void resumed(OpId op, const std::vector<Ticket>& waits);
  void given(const OpLabel& label);

  const HostBackendOptions options_;
  LaneLedger ledger_;
  TimedLane fetch_, drain_, peer_;

  mutable Mutex mutex_;
  struct Allocation {
    Bytes bytes;
    int fd = -1;      // if other processes may open it
    Bytes discarded;  // the part of `bytes` that is discarded
  };
  std::map<std::byte*, Allocation> allocations_ NORIA_GUARDED_BY(mutex_);
  OpenedMemory opened_ NORIA_GUARDED_BY(mutex_);
  bool closed_ NORIA_GUARDED_BY(mutex_) = false;
  Bytes allocated_ NORIA_GUARDED_BY(mutex_);
  std::int64_t num_allocations_ NORIA_GUARDED_BY(mutex_) = 0;
  std::map<Stream, std::unique_ptr<ComputeStream>> streams_ NORIA_GUARDED_BY(mutex_);
  struct OpenOp {
    OpLabel label;
    std::int64_t since_ns = 0;  // opened, or the end of its waits
    bool has_begun = false;     // its first waits are over
    Bytes bytes;
    std::vector<OpId> waits;
  };
  std::unordered_map<OpId, OpenOp> open_ NORIA_GUARDED_BY(mutex_);
};

}  // namespace noria
