// ComputeLane is the stream that the model computes on, and the op of the visit that is open there.
//
// Ownership: borrows backend and issuer from the engine.
// Order: ops of the lane end in the order of their issue. If an open visit needs more, its op ends and the visit goes
// on as another op. If the current stream changes, the new stream first waits for all that is on the old one. So the
// lane stays a queue.
// Threads: the caller serialises. A call may block until what a visit reads has arrived.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "device/backend.h"
#include "engine/issuer.h"
#include "plan/plan.h"

namespace noria {

struct OpenVisit {
  Visit visit;
  Op op;
  Ticket ticket;
  bool is_recomputed = false;  // announced by a forward inside of backward: not yet the unit's backward visit
  std::int64_t opened_us = 0;  // 0: issued, not yet waited for
  std::vector<Ticket> waits;
};

class ComputeLane {
 public:
  ComputeLane(Backend& backend, Issuer& issuer) : backend_(backend), issuer_(issuer) {}

  /// The lane is this stream from now on.
  void continue_on(Stream stream);
  Stream stream() const { return *stream_; }

  /// Returns the visit that is open; null: none is.
  OpenVisit* visit() { return visit_ ? &*visit_ : nullptr; }
  const OpenVisit* visit() const { return visit_ ? &*visit_ : nullptr; }
  /// See Engine::is_visited.
  bool is_visited(const std::vector<UnitId>& needs) const;

  /// Issues the visit's op. The stream does not wait yet.
  void issue(OpenVisit open);
  /// Makes the stream wait for what the open visit waits for.
  void enter(Stream stream);
  /// Goes on with the open visit as another op that makes these accesses too. Does nothing if there are none.
  void go_on(Stream stream, const std::vector<Access>& accesses);
  /// Ends the open visit and returns it.
  OpenVisit end(Stream stream);
  /// Ends the open visit, if there is one, because the pass raised.
  void abandon(Stream stream);

  /// Passes an op of the user's loop, outside of visits; see Issuer::pass.
  void pass(Op op, Stream stream, const std::function<void()>& act = {});
  /// Passes an op inside or outside of a visit. An open visit goes on as another op afterwards.
  void interrupt(Op op, Stream stream, const std::function<void()>& act = {});
  /// The user writes this buffer of the unit now, inside or outside of a visit.
  void write(UnitId unit, BufferId written, Stream stream);

  void add_stall(std::int64_t us) { stalled_us_ += us; }
  /// Returns how long calling threads have waited in visits, since the lane was made.
  std::int64_t stalled_us() const { return stalled_us_; }

 private:
  void begin(OpenVisit& open);
  void await(Stream stream);

  Backend& backend_;
  Issuer& issuer_;
  std::optional<Stream> stream_;
  std::optional<OpenVisit> visit_;
  std::int64_t stalled_us_ = 0;
};

}  // namespace noria
