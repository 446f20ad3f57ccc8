// Drafts works on gradients before `step` asks for it: updates that can be undone (drafts), and sums of squares.
//
// Ownership: borrows the engine's parts and the updates. Order: work begins when the unit's last gradients of a
// backward have been drained, and after its last visit. Threads: the caller serialises; only `sums` blocks.
//
// Note [Drafts]. A draft is the update that is expected to follow. The pool makes it in place as soon as the unit's
// gradients have landed, and logs how to undo it (optim/undo_log.h). `step` asks for the same update. Then the draft is
// kept as it is, or a job on the pool makes it what `step` asks for (a redo). That job is needed in three cases:
// - `step` asks for other hyperparameters;
// - a late scale may change the gradient, and only the device knows;
// - the log had no room for some blocks, which are not updated yet.
//
// A draft is undone if anything else happens before `step`. For example, another backward begins, the unit is fetched,
// its home is looked at, or its gradient is written. The undo is an op of its own, which reads and writes what the
// draft did. So later ops wait for it as for any update. A draft that has not begun is recalled instead.
//
// An undo needs the bytes of the gradient that the draft has read. So it is issued before the op that writes them.
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

/// Counts what became of queued drafts. Kept: as they are. Looked at: kept unless a late scale turns out to change the
/// gradient. Redone: with what `step` asked for. Undone. Dropped: before they began.
struct DraftCounts {
  std::int64_t kept = 0, looked_at = 0, redone = 0, undone = 0, dropped = 0;
  // Of those looked at so far: the scale was 1; it was not, and the update was made anew.
  std::int64_t unchanged = 0, changed = 0;
};

class Drafts {
 public:
  Drafts(EngineParts parts, Updates& updates)
      : parts_(parts),
        updates_(updates),
        eager_(parts.units.size()),
        timing_(parts.units.size()),
        priority_(parts.units.size(), static_cast<int>(parts.units.size())) {}

  // ---- for callers of the engine ----
  /// The unit may be drafted from now on.
  void give_log(UnitId unit, const UndoLog& log) { parts_.units.log_drafts(unit, log); }
  /// Tells what `step` will ask for if nothing changes until then: an update, or the sums alone. The pool does it when
  /// the gradients have landed, if this backward is expected to be the last before a step. A draft needs a log. Does
  /// nothing if `is_read`.
  void expect(UnitId unit, UpdateJob job);
  /// Tells that the next backward brings these units their last gradients before a step. Other units will get more.
  /// None: this is not known. Holds until the next call.
  void set_last_of(const std::optional<std::vector<UnitId>>& units);
  /// The gradient has been scaled on the stream. Call Engine::begin_scaling before.
  void end_scaling(UnitId unit);
  /// Returns true if early work reads this unit's gradients, or has read them. A caller that writes them must then call
  /// Engine::access_held first.
  bool is_read(UnitId unit) const { return eager_[unit] && eager_[unit]->ticket; }
  /// Returns true if the unit has a draft that `step` has not asked for yet.
  bool is_drafted(UnitId unit) const { return is_read(unit) && eager_[unit]->is_draft(); }
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

  /// The user writes the held gradient.
  void note_written(UnitId unit);
  /// The gradient is about to be divided and then multiplied on the stream. If its draft expects other numbers, the
  /// draft is undone.
  void begin_scaling(UnitId unit, float divisor, float prefactor);
  /// Forgets the unit's early work: recalls it, or undoes the draft. Call it before anything writes its gradient, and
  /// before anything reads or writes its home.
  void drop(UnitId unit);
  void drop_draft(UnitId unit) {
    if (is_drafted(unit)) drop(unit);
  }
  void drop_all();
  /// The home's weights and state of the unit are about to be looked at, or written.
  void note_access(UnitId unit);

  /// See Engine::sum_gradients.
  std::vector<std::vector<double>> sums(std::vector<std::pair<UnitId, UpdateJob>> jobs);
  /// Queues `job`, or makes the unit's draft what `job` asks for.
  void update(UnitId unit, UpdateJob job, int priority);
  /// Tells when the next forward needs the unit, as expected; smaller is earlier.
  int priority_of(UnitId unit) const { return priority_[unit]; }

 private:
  /// Describes what is done with a unit's gradients as soon as they have landed.
  struct Early {
    UpdateJob job;             // expected
    Ticket ticket;             // null: not queued
    bool is_recalled = false;  // it is queued again when the gradient has been scaled
    Bytes awaited;             // of gradients that must land first
    bool is_draft() const { return job.task == UpdateTask::draft; }
  };

  void draft(UnitId unit, Early& made);
  Ticket sum(UnitId unit, UpdateJob job);
  Ticket submit(UnitId unit, Verb verb, UpdateJob job, int priority);
  void recall_all();
  void note_priorities(const PassState& pass);

  const EngineParts parts_;
  Updates& updates_;
  UnitMap<std::optional<Early>> eager_;
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
