// Measures when the ops of a device's lanes began and ended: with timed events in their streams, tied to the host's
// clock.
//
// Nothing here waits for the device. An op leaves two events in its stream. Their times are looked up later:
// - when a caller asks for statistics;
// - when a copy is queued;
// - when a lane has `kMostInFlight` ops without a time.
//
// If a lane still has that many afterwards, its newest op is extended over the next ones. Their bytes are counted, and
// the gaps between them count as work.
//
// Units: nanoseconds of `now_ns`.
// Ownership: owns a pool of timed events. A point returns its event when its time is known, or with its last owner.
//   The anchor keeps its event.
// Threads: any; one thread at a time begins and ends the ops of one lane.
//
// Note [Two clocks]. CUDA tells how long after one event another one was reached, as a float of milliseconds. A float
// is exact to a microsecond only over a limited time. So times are counted from an anchor, an event that is renewed
// every second.
//
// The host must place the anchor on its own clock. Two things are true of every event: the device reached it after the
// host had asked for it, and before the host saw that. If a time contradicts this, the anchor is moved. In an idle
// stream an event is reached within microseconds; so is the first anchor, which is in a new stream. Such an event
// therefore reveals an anchor that lies too early. One that lies too late is seldom revealed, because the host looks
// late. So a new anchor is placed a little early, by more than the clocks drift apart in a second.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include <sys/types.h>

#include "base/mutex.h"
#include "base/words.h"
#include "device/backend.h"
#include "device/cuda_device.h"
#include "device/cuda_ticket.h"
#include "device/lane_ledger.h"

namespace noria {

/// A place in a stream, and the time when the device reached it.
struct TimedPoint {
  TimedPoint(std::shared_ptr<EventPool> pool, std::int64_t asked_ns);
  ~TimedPoint();
  TimedPoint(const TimedPoint&) = delete;  // owns its event
  TimedPoint& operator=(const TimedPoint&) = delete;
  void give_back() noexcept;

  const std::shared_ptr<EventPool> events;
  std::int64_t asked_ns;                   // the device reached it later
  cuda::EventHandle event = nullptr;       // null once it has been returned
  std::optional<std::int64_t> reached_ns;  // guarded by the CudaTimes that made it
};
using TimedPointPtr = std::shared_ptr<TimedPoint>;

/// Describes an op of a lane, or a part of one. Without an `end` the lane only waits, and the work is announced later.
struct TimedOp {
  struct Wait {
    OpLabel giver;
    std::int64_t seen_ns;  // when the host saw that it had passed, or had been issued
    TimedPointPtr passed;  // when it passed on the device; null if the host gave it
  };
  static Wait wait_of(const Ticket& issued);

  OpLabel label;
  std::int64_t told_ns = 0;  // no stall of this op begins earlier
  std::vector<Wait> waits;
  TimedPointPtr begin, end;
  Bytes bytes;
  int num_ops = 1;  // 0: a part of an op that continues
};

class CudaTimes {
 public:
  static constexpr std::size_t kMostInFlight = 128;

  CudaTimes(CudaDevice device, LaneLedger& ledger);

  /// Sets the first anchor. The stream is new, so it passes an event as soon as the host asks for it.
  void tie(cuda::StreamHandle stream) noexcept;

  /// Records that the lane waits; the waits are already in its stream. An open op is not busy until they have passed.
  void waits(TimedOp op);
  /// Marks where the stream begins to work on this op.
  void begin(TimedOp& op, cuda::StreamHandle stream);
  /// Marks the end. Returns the point, for ops that wait for this one.
  TimedPointPtr end(TimedOp op, cuda::StreamHandle stream);

  /// These members handle ops that callers give. Waits between `pause` and `resume` do not count as work. `pause`
  /// returns the op to resume, if there is one. If a wait of the compute lane belongs to no op, it pauses the op
  /// that is open there.
  void open(const OpLabel& label);
  std::optional<OpId> pause(const OpLabel& waiter, bool has_waits, cuda::StreamHandle stream);
  void resume(OpId op, cuda::StreamHandle stream);
  TimedPointPtr give(const OpLabel& label, std::int64_t opened_ns, Bytes bytes, cuda::StreamHandle stream);
  void give_up(const OpLabel& label);

  /// Looks up what the device has passed. Throws nothing: on a broken device the ops count, but without a time.
  void poll() noexcept;
  void close() noexcept;
  std::int64_t num_events() const { return events_->num_created(); }

 private:
  struct InFlight {
    std::deque<TimedOp> ops;
    std::int64_t free_ns = 0;  // when the last op or wait ended
    std::vector<OpId> waited;  // what the lane has waited for since
  };
  struct Open {
    OpLabel label;
    TimedPointPtr begin;
  };

  TimedPointPtr mark(cuda::StreamHandle stream);
  bool has_room(Lane lane);
  bool has_room_locked(Lane lane) NORIA_REQUIRES(mutex_);
  bool run_deferred(InFlight& lane, const TimedOp& op) NORIA_REQUIRES(mutex_);
  std::optional<std::int64_t> time_of(const TimedPointPtr& point) NORIA_REQUIRES(mutex_);
  Open* find_open(const OpLabel& waiter) NORIA_REQUIRES(mutex_);
  InFlight& in_flight(Lane lane) NORIA_REQUIRES(mutex_) { return lanes_[static_cast<std::size_t>(lane)]; }
  void poll_locked() NORIA_REQUIRES(mutex_);

  const CudaDevice device_;
  const pid_t pid_;
  const std::shared_ptr<EventPool> events_;
  LaneLedger& ledger_;

  Mutex mutex_;
  std::array<InFlight, kNumLanes> lanes_ NORIA_GUARDED_BY(mutex_);
  std::map<OpId, Open> open_ NORIA_GUARDED_BY(mutex_);
  TimedPointPtr anchor_ NORIA_GUARDED_BY(mutex_);  // Note [Two clocks]
  std::int64_t anchor_ns_ NORIA_GUARDED_BY(mutex_) = 0;
};

}  // namespace noria
