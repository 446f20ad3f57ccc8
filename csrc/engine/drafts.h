// Drafts works on gradients before `step` asks for it: updates out of place (drafts), and sums of squares.
//
// Ownership: borrows the engine's parts and the updates. Order: work begins when the unit's last gradients of a
// backward have been drained. Threads: the caller serialises; only `sums` blocks.
//
// Note [Drafts]. A draft is the update that is expected to follow. The pool computes it as soon as the unit's gradients
// have landed, from the unit's state into spare buffers. `step` asks for the same update in place. If a draft is of the
// same parameters, unit and spare change places. The update is then computed anew in four cases only:
// - `step` asks for other hyperparameters;
// - a late scale changes the gradient;
// - the gradient was written since (torch tells), and its bytes differ;
// - it was first scaled, then written, so that its bytes cannot be compared.
//
// Nothing is rolled back, because no op reads a draft until it is committed. If the user reads the home, the draft is
// dropped. Another backward drops it, too. If a schedule tells which backwards are the last, another backward drops the
// draft only if it brings the unit another gradient.
//
// Note [Last gradients]. LastBackward learns which backward is the last before a step (plan/draft_timing.h). A
// pipeline's schedule knows this for each stage, and says so (`set_last_of`). Then the next backward drafts, or updates
// inside, only the units of that stage. Other units only accumulate. The schedule divides gradients after that
// backward, so the draft's scalars contain this division. If the draft began before the division, `end_scaling` changes
// its record to describe the gradient as it is then. If it has not begun, it reads the divided gradient.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/options.h"
#include "engine/pass_state.h"
#include "engine/updates.h"
#include "plan/draft_timing.h"

namespace noria {

/// Counts queued drafts: kept as they are, kept unless a look finds another gradient, redone with what `step` asked
/// for, or dropped.
struct DraftCounts {
  std::int64_t kept = 0, looked_at = 0, redone = 0, dropped = 0;
  // Of those looked at so far: the gradient was the same; it differed, and the update was computed anew.
  std::int64_t unchanged = 0, changed = 0;
};

class Drafts {
 public:
  Drafts(EngineParts parts, Updates& updates)
      : parts_(parts),
        updates_(updates),
        eager_(parts.units.size()),
        is_swapped_(parts.units.size()),
        timing_(parts.units.size()),
        priority_(parts.units.size(), static_cast<int>(parts.units.size())) {}

  // ---- for callers of the engine ----
  /// Tells what `step` will ask for if nothing changes until then: an update out of place, or the sums alone. The pool
  /// does it when the gradients have landed, if this backward is expected to be the last before a step. A draft needs a
  /// spare. Does nothing if `is_read`.
  void expect(UnitId unit, UpdateJob job);
  /// Tells that the next backward brings these units their last gradients before a step. Other units will get more.
  /// None: this is not known. Holds until the next call.
  void set_last_of(const std::optional<std::vector<UnitId>>& units);
  /// The gradient has been divided and then multiplied on the stream. If its draft expected other numbers, the draft is
  /// dropped. Call Engine::begin_scaling before.
  void end_scaling(UnitId unit, float divisor, float prefactor);
  /// Returns true if early work reads this unit's gradients, or has read them. A caller that writes them must then call
  /// Engine::access_held first.
  bool is_read(UnitId unit) const { return eager_[unit] && eager_[unit]->ticket; }
  /// Returns true if unit and spare have changed places an odd number of times.
  bool is_swapped(UnitId unit) const { return is_swapped_[unit]; }
  /// Returns true if a step is expected after the backward that began last.
  bool expects_step() const { return is_eager_; }
  DraftCounts counts() const;

  // ---- for the engine ----
  bool brings_last(UnitId unit) const { return !last_of_ || (*last_of_)[unit]; }
  /// A backward begins. `is_synced`: its gradients are reduced over the ranks, or no ranks share the home.
  void begin_backward(const PassState& pass, std::optional<ItineraryId> expected, bool is_synced);
  /// These bytes of units' gradients have been drained at the visit of this position.
  void note_drained(std::int64_t position, const std::vector<std::pair<UnitId, Bytes>>& drained);
  void end_backward(ItineraryId backward) { last_backward_.end_backward(backward); }
  void end_step() { last_backward_.end_step(); }
  void forget(ItineraryId backward) { last_backward_.forget(backward); }

  /// Returns true if early work has read this unit's gradients, and they have not been written since.
  bool is_unedited(UnitId unit) const { return is_read(unit) && !eager_[unit]->is_written; }
  /// The user writes the held gradient.
  void note_written(UnitId unit);
  void begin_scaling(UnitId unit);
  /// Drops the unit's early work. If it has begun, it writes where no op reads.
  void drop(UnitId unit);
  void drop_all();
  /// The home's weights and state of the unit are about to be looked at, or written.
  void note_access(UnitId unit, bool writes);

  /// See Engine::sum_gradients.
  std::vector<std::vector<double>> sums(std::vector<std::pair<UnitId, UpdateJob>> jobs);
  /// Queues `job`, which is in place, or commits its draft. Returns true if a draft was committed.
  bool update(UnitId unit, UpdateJob job, int priority);
  /// Tells when the next forward needs the unit, as expected; smaller is earlier.
  int priority_of(UnitId unit) const { return priority_[unit]; }

 private:
  /// Describes what is done with a unit's gradients as soon as they have landed.
  struct Early {
    UpdateJob job;             // expected
    Ticket ticket;             // null: not queued
    bool is_written = false;   // the gradient has been written, or may have been
    bool is_recalled = false;  // it is queued again when the gradient has been scaled
    bool is_scaled = false;    // the gradient has been scaled since it was read
    Bytes awaited;             // of gradients that must land first
    bool is_draft() const { return job.task == UpdateTask::update; }
  };

  void draft(UnitId unit, Early& made);
  Ticket sum(UnitId unit, UpdateJob job);
  void commit(UnitId unit, const Early& draft, UpdateJob& job, bool as_expected);
  void submit(UnitId unit, UpdateJob job, int priority, bool is_committed);
  void recall_all();
  void swap_with_spare(UnitId unit);
  void note_priorities(const PassState& pass);

  const EngineParts parts_;
  Updates& updates_;
  UnitMap<std::optional<Early>> eager_;
  UnitMap<bool> is_swapped_;
  DraftTiming timing_;
  UnitMap<int> priority_;  // see `priority_of`
  LastBackward last_backward_;
  std::optional<UnitMap<bool>> last_of_;  // see `set_last_of`
  bool is_any_last_ = false;              // `last_of_` has a unit
  bool is_eager_ = false;                 // this backward is expected to be followed by an update
  bool may_recall_ = false;               // early work has been issued since all of it was last recalled
  DraftCounts counts_;
  const std::shared_ptr<LookCounts> looks_ = std::make_shared<LookCounts>();
};

}  // namespace noria
