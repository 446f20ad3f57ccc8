// Drainer opens gradient buffers, notes what has arrived in them, and queues the drains that carry it home.
//
// Units: byte ranges inside a unit's gradient layout, which is the same on the device and in the home.
// Ownership: borrows what the constructor takes.
// Order: a buffer opens with a visit and is drained when the visit ends. So a unit whose gradients come in several
// visits is drained in several parts. Only what arrived is copied.
// Threads: the caller serialises.
//
// Note [Accumulation]. A visit's gradients may be added to what is held. The fetch lane brings that into the buffer,
// one visit ahead if its memory is free by then. When the first of these gradients comes, the visit goes on as another
// op, which waits for this fetch. So a drain is always a plain copy. The device itself reads the home only if something
// has written the held gradient since the fetch, or may have.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "base/ranges.h"
#include "engine/collector.h"
#include "engine/engine_callbacks.h"
#include "engine/issuer.h"
#include "engine/unit_table.h"
#include "store/leases.h"

namespace noria {

class Drainer {
 public:
  /// `collector` null: this process alone has the home. Else gradients are reduced over the ranks first.
  /// `tells_arrivals`: sums also tell which gradients have come to any rank.
  Drainer(Issuer& issuer, Leases& leases, const UnitTable& units, Place device, EngineCallbacks& callbacks,
          Collector* collector, bool tells_arrivals)
      : issuer_(issuer),
        leases_(leases),
        units_(units),
        device_(device),
        callbacks_(callbacks),
        collector_(collector),
        tells_arrivals_(tells_arrivals),
        unreduced_(units.size()),
        arrivals_(units.size()) {}

  /// Leases a gradient buffer for a visit to come, and brings into it what is held.
  void bring(UnitId unit, Bytes offset);
  /// Opens the buffer, and brings what has not been brought. Returns what the compute op that fills it accesses:
  /// nothing yet if something is brought.
  std::vector<Access> open(UnitId unit, Bytes offset);
  /// Gives the buffers of visits to come back: others may come.
  void give_back_brought();
  /// A gradient of the unit has come. Returns what the compute op accesses from now on; nothing if that was returned
  /// before.
  std::vector<Access> take_up(UnitId unit);
  /// Returns true if these bytes have been brought, and nothing has written the held gradient since.
  bool is_brought(UnitId unit, Bytes offset, Bytes bytes) const;
  bool is_open(UnitId unit) const { return open_.contains(unit); }

  /// Bytes [offset, offset + bytes) of the unit's gradient have been written on the compute stream.
  void arrived(UnitId unit, Bytes offset, Bytes bytes);

  /// Queues the drain of every open buffer and gives the buffers back. Returns by unit how many bytes were drained. The
  /// compute ticket must have been given.
  std::vector<std::pair<UnitId, Bytes>> drain_open();
  /// If true, gradients stay this rank's own from now on, in `unreduced`. If false, they are reduced over the ranks,
  /// together with what lies there.
  void set_unsynced(bool unsynced) { unsynced_ = unsynced; }
  /// If true, a drain sums from now on all that lies in `unreduced` of its unit, and not only what has arrived again.
  void set_reduces_rest(bool reduces_rest) { reduces_rest_ = reduces_rest; }
  /// Returns the units that still have something in `unreduced`, though gradients are reduced now.
  std::vector<UnitId> left_unreduced() const;
  bool is_unsynced() const { return unsynced_; }
  /// Returns true if later gradients of these bytes are added to what lies in `unreduced`.
  bool is_unreduced(UnitId unit, Bytes offset, Bytes bytes) const;
  /// Returns true if the next sum over the ranks is added to what earlier sums have brought.
  bool is_reduced(UnitId unit, Bytes offset, Bytes bytes) const;
  /// What is held of these bytes counts as the sum over the ranks: later sums are added to it.
  void note_reduced(UnitId unit, Bytes offset, Bytes bytes);
  /// The user has cleared these bytes of a unit's gradient. Later sums do not add to them.
  void forget(UnitId unit, Bytes offset, Bytes bytes);
  /// What was reduced of this unit has been used up.
  void forget_reduced(UnitId unit);
  /// Returns the parameters whose gradients this unit's sums since the last call have brought, from any rank. The set
  /// is complete when these sums are done. Null: there was no sum.
  std::shared_ptr<const ParameterSet> take_arrivals(UnitId unit);

  /// Gives the buffers back without a drain: what arrived is lost (the pass raised).
  void abandon();

  /// Returns the units drained since the last call, each once.
  std::vector<UnitId> take_landed();

  Bytes drained() const { return drained_; }
  /// Returns the bytes fetched to be added to.
  Bytes brought() const { return brought_; }
  /// Returns the bytes received from other ranks, to be reduced.
  Bytes reduced() const { return reduced_; }

 private:
  struct Open {
    Bytes offset;
    BufferId buffer;
    Ranges arrived;
    Ranges brought;
    Version of = 0;  // what was brought is the held gradient at this version
    bool is_taken_up = true;
  };
  /// Holds what later gradients are added to.
  struct Held {
    std::byte* memory;
    BufferId buffer;
  };
  Held held(UnitId unit) const;
  /// Returns the accesses of the compute op that fills the buffer.
  std::vector<Access> accesses(UnitId unit, const Open& open);
  void close(UnitId unit, const Open& open, bool is_drained);
  void release(UnitId unit, const Open& open);
  Bytes drain(UnitId unit, const Open& open, std::byte* to, BufferId into);
  Bytes sum(UnitId unit, const Open& open);
  // True also under update="backward", where the update may follow at once.
  bool takes_rest() const { return !unsynced_ && (reduces_rest_ || tells_arrivals_); }
  void tell_arrivals(UnitId unit, const Open& open, Reduction& reduction);

  Issuer& issuer_;
  Leases& leases_;
  const UnitTable& units_;
  const Place device_;
  EngineCallbacks& callbacks_;
  Collector* const collector_;
  const bool tells_arrivals_;
  UnitMap<Ranges> unreduced_;  // what lies in `unreduced`
  UnitMap<std::shared_ptr<ParameterSet>> arrivals_;
  bool unsynced_ = false;
  bool reduces_rest_ = false;
  std::map<UnitId, Open> open_;
  std::map<UnitId, Open> to_come_;  // leased for visits that have not been issued
  std::set<UnitId> landed_;
  Bytes drained_, brought_, reduced_;
};

}  // namespace noria
