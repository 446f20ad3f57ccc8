// BackwardUpdates updates units inside of backward, as soon as their gradients are complete (update="backward").
//
// Ownership: owns the gradient ring; its memory is the caller's. Borrows the rest from the engine.
// Order: a unit is updated after the visit that brings its last gradient. `step` only hears of it (`take_updated`).
// Threads: the caller serialises. `sums` blocks, and `update_held` may.
//
// Note [Inside backward]. With a gradient ring, held gradients lie in the ring alone. The exception is a unit whose
// gradients come in parts: it has a place of its own. A unit is updated in place as soon as its gradients are complete.
// They are complete after the unit's last visit (plan/completion.h). Units that are left are updated at the end of the
// pass. An update cannot be undone. So a gradient or a visit that comes after it raises, and the weights are torn. They
// are also torn if a backward raises after an update of the same step, in this backward or an earlier one. Passes that
// only accumulate need memory for all gradients (`hold_all`). After that call the ring is not used any more.
//
// Note [Postponed]. If all units were updated as their gradients come, the forward's first unit would be the last one.
// Then nothing would be left to read or write in that forward. So if state lies in files, some updates wait for the end
// of the backward (FileStates::postpones). They come in the order of the forward. Meanwhile each keeps its slot of the
// ring. If the ring is full, those that wait are updated at once.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/compute_lane.h"
#include "engine/drafts.h"
#include "engine/drainer.h"
#include "engine/pass_state.h"
#include "engine/updates.h"
#include "plan/completion.h"

namespace noria {

class BackwardUpdates {
 public:
  BackwardUpdates(EngineParts parts, const PassState& pass, ComputeLane& compute, Updates& updates, Drafts& drafts,
                  Drainer& drainer, GradientRing ring);

  // ---- for callers of the engine ----
  /// Holds an update. By piece, `gradients` tells where the piece's gradient lies in facts.gradients. No job: the
  /// update runs at once, on the thread of the backward, as a deferred update does (Updates).
  struct Expected {
    std::optional<UpdateJob> job;
    std::vector<Bytes> gradients;
  };
  /// Sets the update of this unit for the backward that begins. Pieces whose gradients do not come are left out.
  void expect(UnitId unit, Expected update);
  /// Forgets the updates that were expected of earlier backwards. Call it before a backward that updates.
  void forget_expected();
  /// From now on passes only accumulate, or no longer do.
  void set_accumulating(bool accumulating);
  bool holds_all() const { return !ring_; }
  struct Updated {
    UnitId unit;
    std::vector<std::pair<Bytes, UpdateScalars>> pieces;  // offset of the gradient
    std::set<Bytes> come;                                 // those that this rank knew of when the update was issued
  };
  /// Returns the units whose update was issued inside backward, and that `take_updated` has not returned yet.
  std::vector<UnitId> unclaimed() const;
  std::vector<Updated> take_updated(const std::set<UnitId>& units);
  /// For the update of a unit that runs now: the gradients that it is to use, by offset, and where they lie.
  std::set<Bytes> used_now(UnitId unit) const;
  std::byte* gradients_now(UnitId unit) const { return parts_.units[unit].held; }
  /// Returns sums of the squares of gradients that the unit's last update has used, by offset. If ranks share the home,
  /// the sums are of this rank's shard. Blocks until that update is done.
  std::map<Bytes, double> sums(UnitId unit) const;
  /// Adds gradients that any rank has had, by unit and offset. Call Engine::end_reductions before.
  void note_arrived(const std::map<UnitId, std::set<Bytes>>& came);

  // ---- for the engine ----
  /// Gives memory for all gradients, by unit, between passes.
  void hold_all(const UnitMap<std::byte*>& held);
  /// Takes a slot of the ring for the unit's gradients, if they have no memory.
  void hold(UnitId unit);
  /// Returns true if a gradient has come that no update has used.
  bool is_held_back(UnitId unit, Bytes offset) const { return arrived_[unit].contains(offset); }
  void drop_gradient(UnitId unit, Bytes offset) { arrived_[unit].erase(offset); }

  /// `is_counted`: this pass is a backward, or a forward that a backward may follow.
  void begin_pass(bool is_counted) { is_counted_ = is_counted; }
  void end_forward(ItineraryId forward);
  void begin_backward(std::optional<ItineraryId> expected);
  /// Another module has used these units inside of an open visit. In the other direction it may be a visit of its own.
  /// Returns false if uses do not count in this pass.
  bool count_use(const std::vector<UnitId>& units);
  void note_gradient(UnitId unit, Bytes offset) { arriving_[unit].insert(offset); }
  void note_drained(const std::vector<std::pair<UnitId, Bytes>>& drained);
  /// Updates the units that this visit was the last for.
  void end_visit(const Visit& visit, bool is_recomputed);
  /// Throws UsageError if the unit has been updated in the backward that is open. `what` says what happens to it now.
  void refuse_updated(UnitId unit, const std::string& what);
  /// Issues the updates of what is left. `what_accumulates`: also of units for which passes only accumulate.
  void update_rest(bool what_accumulates);
  /// See Engine::update_held.
  void update_held(Stream stream);
  /// The backward raised.
  void abandon();
  /// All has been loaded, so no `step` is to claim earlier updates.
  void clear_torn() { unclaimed_.clear(); }

 private:
  struct Sums {
    Ticket update;
    GradientSums sums;
    std::vector<Bytes> gradients;  // by piece: the offset of its gradient
  };

  std::optional<int> take_slot();
  [[noreturn]] void refuse_full_ring(UnitId unit) const;
  Bytes held_bytes(UnitId unit) const;
  void release_held(UnitId unit);
  /// Returns false if passes only accumulate gradients of this unit now.
  bool completes(UnitId unit) const { return !accumulating_ && drafts_.brings_last(unit); }
  /// The unit's gradients are complete: updates it now, or postpones that.
  void complete(UnitId unit);
  void update(UnitId unit);
  void update_here(UnitId unit, Updated& claimed);
  UpdateJob take_job(UnitId unit, Updated& claimed);

  const EngineParts parts_;
  const PassState& pass_;
  ComputeLane& compute_;
  Updates& updates_;
  Drafts& drafts_;
  Drainer& drainer_;

  std::optional<GradientRing> ring_;  // none: every unit has held memory of its own
  bool accumulating_ = false;
  bool is_counted_ = false;
  UnitMap<std::optional<Expected>> expected_;
  UnitMap<std::set<Bytes>> arriving_;  // offsets of gradients that wait for their drain
  UnitMap<std::set<Bytes>> arrived_;   // offsets of gradients that were drained and that no update has used
  UnitMap<std::optional<int>> slot_;   // in the ring; none: no slot now, or a place of its own
  std::map<int, Ticket> reader_;       // by slot: ticket of the update that read it last
  Completion completion_;
  UnitMap<bool> is_updated_;         // in this backward
  std::map<UnitId, int> completed_;  // in this backward, units with files: their number
  UnitMap<Sums> sums_;               // of the last update; filled if ranks share the home
  std::vector<Updated> unclaimed_;
};

}  // namespace noria
