// When the ops of a device's lanes began and ended: timed events in their streams, and the host's clock tied to them.
//
// Nothing here waits for the device. An op leaves two events in its stream; what the device has passed is looked up
// later, when somebody asks for numbers or when a copy is queued. A lane has at most `kMostInFlight` ops whose times
// are not known yet. If there are more, the newest of them is stretched over those that follow: their bytes are
// counted, and the gaps between them count as work.
//
// Units: nanoseconds of `now_ns`. Ownership: a pool of timed events; a point gives its event back when its time is
// known, or with its last owner. Threads: any; the ops of one lane are begun and ended by one thread at a time.
//
// Note [Two clocks]. CUDA tells how long after one event another one was reached, as a float of milliseconds. So times
// are counted from an anchor, an event that is renewed every second, for a float is exact to a microsecond only over
// so much. Where the anchor lies on the host's clock follows from what must be true of every event: it was reached
// after the host had asked for it, and before the host saw that. What contradicts this moves the anchor. An event in
// an idle stream is reached within microseconds, as is the first anchor, in a new stream. So an anchor that lies too
// early is found out at the next of these; one that lies too late is not, so a new anchor is put a little early, by
// more than clocks drift apart in a second.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <sys/types.h>

#include "base/words.h"
#include "device/backend.h"
#include "device/cuda_device.h"
#include "device/cuda_ticket.h"
#include "device/lane_ledger.h"

namespace noria {

/// A place in a stream, and when the device came by.
struct TimedPoint {
  TimedPoint(std::shared_ptr<EventPool> pool, std::int64_t asked_ns);
  ~TimedPoint();
  TimedPoint(const TimedPoint&) = delete;  // its event is one
  TimedPoint& operator=(const TimedPoint&) = delete;
  void give_back() noexcept;

  const std::shared_ptr<EventPool> events;
  std::int64_t asked_ns;                   // the device came by later
  cuda::EventHandle event = nullptr;       // none once the time is known
  std::optional<std::int64_t> reached_ns;  // guarded by the CudaTimes that made it
};
using TimedPointPtr = std::shared_ptr<TimedPoint>;

/// What a lane was told to do. Without an end it only waits: the work is announced later.
struct TimedOp {
  struct Wait {
    OpLabel giver;
    std::int64_t seen_ns;  // when it had passed, or had been issued, as the host saw it
    TimedPointPtr passed;  // when it passed on the device; none if the host gave it
  };
  static Wait wait_of(const Ticket& issued);

  OpLabel label;
  std::int64_t told_ns = 0;  // before that the lane did not stand still because of this op
  std::vector<Wait> waits;
  TimedPointPtr begin, end;
  Bytes bytes;
  int num_ops = 1;  // 0: a part of an op that goes on
};

class CudaTimes {
 public:
  static constexpr std::size_t kMostInFlight = 128;

  CudaTimes(CudaDevice device, LaneLedger& ledger);

  /// The first anchor: this stream is new, so it passes an event as soon as it is asked to.
  void tie(cuda::StreamHandle stream) noexcept;

  /// The lane waits, and what it waits for is in its stream. Of an op that is open: it is busy from here on.
  void waits(TimedOp op);
  /// From here on in the stream, what is queued is the op's.
  void begin(TimedOp& op, cuda::StreamHandle stream);
  /// Up to here. Returns the point, for who waits for the op.
  TimedPointPtr end(TimedOp op, cuda::StreamHandle stream);

  /// The ops that callers give. `pause`: what waits come next in the stream are no work. Returns the op that `resume`
  /// then lets begin, or go on. A wait of the compute lane that is no op's holds up the one that is open there.
  void open(const OpLabel& label);
  std::optional<OpId> pause(const OpLabel& waiter, bool has_waits, cuda::StreamHandle stream);
  void resume(OpId op, cuda::StreamHandle stream);
  TimedPointPtr give(const OpLabel& label, std::int64_t opened_ns, Bytes bytes, cuda::StreamHandle stream);
  void give_up(const OpLabel& label);

  /// Looks up what the device has passed. Throws nothing: on a broken device the ops count, without a time.
  void poll() noexcept;
  void close() noexcept;
  std::int64_t num_events() const { return events_->num_created(); }

 private:
  struct InFlight {
    std::deque<TimedOp> ops;
    std::int64_t free_ns = 0;  // when the last op was over
    std::vector<OpId> waited;  // what the lane has waited for since
  };
  struct Open {
    OpLabel label;
    TimedPointPtr begin;
  };

  TimedPointPtr mark(cuda::StreamHandle stream);
  bool has_room(Lane lane);
  bool has_room_locked(Lane lane);
  bool settle(InFlight& lane, const TimedOp& op);
  std::optional<std::int64_t> time_of(const TimedPointPtr& point);
  Open* find_open(const OpLabel& waiter);
  InFlight& in_flight(Lane lane) { return lanes_[static_cast<std::size_t>(lane)]; }
  void poll_locked();

  const CudaDevice device_;
  const pid_t pid_;
  const std::shared_ptr<EventPool> events_;
  LaneLedger& ledger_;

  std::mutex mutex_;  // protects all below
  std::array<InFlight, kNumLanes> lanes_;
  std::map<OpId, Open> open_;
  TimedPointPtr anchor_;  // Note [Two clocks]
  std::int64_t anchor_ns_ = 0;
};

}  // namespace noria
