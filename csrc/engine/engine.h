// Follows the plan: the one object that Python holds. Hooks say what the model does now; the engine plays the ops that
// the plan has for this moment, gives and takes tickets, and counts.
//
// Ownership: owns issuer, leases, fetcher, drainer, collector, saver and copies at peers; shares the backend and the
// host optimizer; borrows the custodian, which must outlive it. Order: the calls are the program; ops are issued in the
// order of the calls and nothing else orders them but the waits that `hazards` derives. Threads: one call at a time (a
// mutex sees to it); a call may block until a fetch has arrived, an update is sealed, or gradients have landed. Never
// called with the GIL held.
//
// Note [A visit]. `announce` ends the visit before it: its compute ticket is given, what arrived is drained, its units
// are evicted from their parameters. Then the ops that the plan has for the new visit are issued, the stream waits for
// what the visit reads, and its units are attached. A visit that is announced while its units are attached already is
// no visit. What the plan did not foresee (another branch, a gradient that comes unexpectedly) is planned on the spot
// from what lies on the device now, and learnt when the pass ends.
//
// Note [The compute lane] is the stream that is current at the hook. When that changes, the new one first waits for all
// that is on the old one, so that the lane stays a queue.
//
// Note [Drafts]. A draft is the update that is expected to follow, carried out as soon as the unit's gradients have
// landed: from the unit's state into spare buffers, by the pool. `step` asks for the same update in place, as ever: if
// there is a draft, unit and spare change places, and only where hyperparameters are others is it carried out anew, or
// where the gradient has been written since (torch says so) and its bytes are others. Nothing is rolled back: until it
// is committed, nobody reads a draft. Another backward drops it (where a schedule tells which are the last: a gradient
// that comes after it), and so does a look at the home.
//
// Note [Last gradients]. Which backward is the last before a step is learnt: a backward that was followed by a step is
// expected to be so the next time. A pipeline's schedule knows it, of each stage by itself, and says so
// (`set_last_of`): then the backward that comes drafts, or updates inside, the units of that stage alone, and others
// only accumulate. What it does to gradients after that, dividing them, is in the draft's scalars; where the draft has
// begun before, its record is of the gradient as it is then (`end_scaling`), and what has not begun reads that one.
//
// Note [Inside backward]. With a gradient ring there are no held gradients beyond it, but for units that have a place
// of their own there, because their gradients come in parts: a unit is updated in place as soon as its gradients are
// complete, and `step` only hears of it (`take_updated`). They are complete when the backward has made the unit's last
// visit, or in an unknown one as many as the forwards before it; what is left is updated at the end of the pass. That a
// gradient or a visit comes after the update cannot be undone: it raises, and the weights are torn, as they are when a
// backward raises once it, or another one of the same step, has updated something. Passes that only accumulate want
// memory for all gradients (`hold_all`), and the ring is then not used any more.
//
// Note [Shards]. Where ranks share the home, each has one part of every unit: of its trainable bytes, and of its frozen
// ones, as many for each rank. A fetch is a copy of this rank's part and a gather of the others'; gradients are summed
// over the ranks before this rank's part is drained. Both are ops of the collect lane, issued where one device fetches
// and drains, so ranks that run the same modules meet in the same order; where they run others, the lane assists
// (comm/collect_lane.h), and what came to a held gradient meanwhile is known after the exchange that ends the backward:
// updates of it wait for that like for a drain, and a draft that was made before is dropped. Nobody sees what is held.
// Gradients of a pass that is not synced (`set_unsynced`) are drained whole, to memory of their own; the next pass that
// is adds to those that come again, and sums up the others at its end. An update inside backward that follows a sum
// learns from it, when it begins, which gradients any rank has had.
//
// Note [Updates]. An update is an op on the update lane. On the pool it is issued at `step` and the fetch that needs
// it waits for it. On the launching thread (kernel="torch") it is issued when somebody needs what it reads or writes:
// `settle`. Either way the unit's version rises at `step`, so no device copy of it is taken for current.
//
// Note [Hidden updates]. Time in which updates run lies behind a pass while the compute lane is at one of its visits.
// It is exposed while that lane waits, for whatever reason, and outside of passes: in `step`, and in what the loop does
// between them. What the lane does is known from its own clock (device/cuda_times.h), what it has done last of a device
// a little later.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/trace.h"
#include "device/backend.h"
#include "device/update_time.h"
#include "engine/collector.h"
#include "engine/custodian.h"
#include "engine/drainer.h"
#include "engine/fetcher.h"
#include "engine/issuer.h"
#include "engine/saver.h"
#include "engine/unit.h"
#include "optim/host_optimizer.h"
#include "plan/itinerary.h"
#include "store/gradient_ring.h"
#include "store/leases.h"

namespace noria {

struct EngineOptions {
  Place device;
  Budget budget;
  bool prefetch_at_step = true;       // the next forward's first units, as soon as `step` has queued their updates
  std::optional<GradientRing> ring;   // engaged: updates run inside backward; see Note [Inside backward]
  std::shared_ptr<CollectLane> lane;  // engaged: ranks share the home; see Note [Shards]
  CollectScratch scratch;             // for the lane
  bool saves = false;                 // what forwards save for their backwards may leave; see engine/saver.h
  std::optional<Bytes> saved_room;    // on the device, for what stays; none: as little as overlap allows
};

/// What one kind of pass did, for the report.
struct PassStats {
  ItineraryId itinerary;
  Signature signature;
  std::int64_t num_visits = 0;
  std::int64_t times = 0;
  std::optional<std::int64_t> planned_fetches;  // of the last occurrence; none: it was unknown, or left its plan
  std::int64_t fetches = 0;                     // of the last occurrence
  std::int64_t unplanned_visits = 0;            // of all occurrences
};

/// Sums over the `num_steps` steps that ended after the first one; until that has ended, over what was.
struct StepSums {
  std::int64_t num_steps = 0;
  std::int64_t wall_us = 0;
  std::int64_t forward_us = 0, backward_us = 0;  // inside visits; by the clock of who computes
  std::int64_t forward_stall_us = 0, backward_stall_us = 0;
  Bytes forward_fetched, backward_fetched, drained, reduced;  // reduced: got from other ranks, to be summed
  Bytes copied;                                               // between home and device, both ways, of whatever kind
  Bytes updated;                                              // read and written by the pool
  std::int64_t forward_fetch_us = 0, backward_fetch_us = 0, drain_us = 0, offload_us = 0, peer_us = 0;
  std::int64_t forward_collect_us = 0, backward_collect_us = 0;
  std::int64_t update_us = 0;  // the sum of the next three; see Note [Hidden updates]
  std::int64_t update_behind_forward_us = 0, update_behind_backward_us = 0, update_exposed_us = 0;
};

/// Of the drafts that were begun: kept as they were, kept after a look at the gradient, redone with what `step` asked
/// for, dropped.
struct DraftCounts {
  std::int64_t kept = 0, looked_at = 0, redone = 0, dropped = 0;
  // Of those looked at, by now: the gradient was the same; it was another, and the update was carried out anew.
  std::int64_t unchanged = 0, changed = 0;
};

class Engine {
 public:
  Engine(EngineOptions options, std::shared_ptr<Backend> backend, std::vector<EngineUnit> units, BufferTable buffers,
         Custodian& custodian, std::shared_ptr<HostOptimizer> optimizer);
  ~Engine();                       // closes backend and optimizer if they are open; does not throw
  Engine(const Engine&) = delete;  // others point into it
  Engine& operator=(const Engine&) = delete;

  // ---- passes ----
  void begin_pass(const Signature& signature, Stream stream);
  /// `recomputes`: by a forward inside of a backward, which makes activations once more.
  void announce(HookId hook, const std::vector<UnitId>& needs, Phase phase, Stream stream, bool recomputes = false);
  /// Ends the visit without another one beginning (the outermost module returned, or a block did).
  void leave(Stream stream);
  /// A gradient of this unit is about to be written: makes sure that its buffer is open, and that what it is added to
  /// has come.
  void expect_gradient(UnitId unit, Stream stream);
  /// After that: these bytes of the buffer are what the gradient is added to.
  bool is_brought(UnitId unit, Bytes offset, Bytes bytes) const;
  void gradient_arrived(UnitId unit, Bytes offset, Bytes bytes);
  /// Ends the pass; after a backward the stream waits until everything has landed. Returns the units that did.
  std::vector<UnitId> end_pass(Stream stream);
  /// Ends a pass that raised: leases stay, what was not drained is lost.
  void reset(Stream stream);
  /// What lies on the device of this unit is not what the home holds: it is never used again.
  void forget(UnitId unit);
  std::optional<Phase> phase() const;
  /// True while a visit is open that needs all of these (sorted).
  bool is_visited(const std::vector<UnitId>& needs) const;
  ItineraryId last_forward() const { return last_forward_; }
  /// In a backward: whether it is the last before a step, as far as is known.
  bool expects_step() const;

  // ---- updates ----
  /// The user's clip and edits of `held` are on the stream. `scale` queues there what writes the scales of these units'
  /// gradients; it is called once nobody reads the former ones.
  void begin_step(Stream stream, const std::vector<UnitId>& scaled = {}, const std::function<void()>& scale = {});
  /// What `step` will ask for if it comes as things are now, an update out of place or the sums alone: done when the
  /// gradients have landed, if this backward is the last before a step, as far as is known. A draft wants a spare.
  void expect_update(UnitId unit, UpdateJob job);
  /// Of these units the next backward brings the last gradients before a step, of the others more will come; none:
  /// nobody knows. Until the next call.
  void set_last_of(const std::optional<std::vector<UnitId>>& units);
  /// As `access_held`, for a caller who does to the gradient what drafts of it foresee; then says what that was.
  void begin_scaling(UnitId unit, Stream stream);
  void end_scaling(UnitId unit, float divisor, float prefactor);
  /// Its gradients are being read, or have been: whoever writes them must say so first (`access_held`).
  bool is_read_early(UnitId unit) const;
  /// Sums of squares by piece of each job, all of task `sum`; taken on the pool where no draft has brought them. Blocks
  /// until the last one is there. What the user's loop did to `held` is on the stream.
  std::vector<std::vector<double>> sum_gradients(std::vector<std::pair<UnitId, UpdateJob>> jobs, Stream stream);
  /// Its working copy and state lie where its spare was at first.
  bool is_moved(UnitId unit) const { return moved_[static_cast<std::size_t>(unit.value)]; }
  /// `job` is in place, and more urgent with a smaller `priority`. True: a draft was committed, so that working copy
  /// and state lie where the spare ones were.
  bool update_on_pool(UnitId unit, UpdateJob job, int priority);
  // ---- update="backward" ----
  /// An update, and where in facts.gradients the gradient of each of its pieces lies.
  struct ExpectedUpdate {
    UpdateJob job;
    std::vector<Bytes> gradients;
  };
  /// The update of this unit in the backward that begins; pieces whose gradients do not come are left out.
  void expect_in_backward(UnitId unit, ExpectedUpdate update);
  /// From now on passes accumulate, or no longer do.
  void set_accumulating(bool accumulating);
  bool holds_all() const;
  /// By unit: memory for all gradients. Ends a forward that is open.
  void hold_all(const std::vector<std::byte*>& held, Stream stream);
  /// A gradient has come that no update has used.
  bool is_held_back(UnitId unit, Bytes offset) const;
  /// The user has cleared it: no update will use it.
  void drop_gradient(UnitId unit, Bytes offset, Bytes bytes);
  /// Units whose update backward has issued and `step` has not heard of.
  std::vector<UnitId> unclaimed() const;
  /// Some units have been updated and others will not be: until a load of both, nothing goes on.
  void tear(const std::string& why);
  /// Before a backward that updates: what was expected of earlier ones is forgotten.
  void forget_expected();
  /// `step` after passes that have only accumulated: their updates now.
  void update_held(Stream stream);
  struct Updated {
    UnitId unit;
    std::vector<std::pair<Bytes, UpdateScalars>> pieces;  // offset of the gradient
    std::set<Bytes> come;                                 // of these gradients, what this rank knew when it was issued
  };
  std::vector<Updated> take_updated(const std::set<UnitId>& units);
  /// Of the squares of gradients that the last updates inside backward have used, by offset; where ranks share the
  /// home, of this rank's part. Blocks until these are through.
  std::map<Bytes, double> sums_in_backward(UnitId unit);

  void defer_update(UnitId unit);
  void end_step(bool blocking);
  /// Runs the unit's deferred update, if it has one, on this thread.
  void settle(UnitId unit);
  void settle_all();
  /// Units in the order in which the next forward is expected to need them; those it does not need come last.
  std::vector<UnitId> next_forward_order() const;

  // ---- what forwards save ----
  void add_peer(const PeerMemory& peer);
  bool shrink_peer(std::int32_t rank, Bytes left);
  void send_saved_home(std::set<HookId> hooks);
  void set_saved_room(Bytes room);
  /// As the saver's.
  SavedId save(const std::byte* memory, Bytes bytes);
  void share_saved(SavedId saved);
  void await_saved(SavedId saved, Stream stream);
  void forget_saved(const std::vector<SavedId>& saved);
  SavedStats saved_stats() const;
  std::map<HookId, SavedByModule> saved_by_module() const;

  // ---- units at peers: as PeerCopies ----
  void add_copy_peer(const PeerMemory& peer);
  void shrink_copy_peer(std::int32_t rank, Bytes left);
  /// Not where ranks share the home.
  void keep_copies(const std::vector<UnitId>& units);
  CopyStats copy_stats() const;
  /// By unit, from wherever.
  std::vector<std::int64_t> times_fetched() const;

  // ---- the home, seen from outside ----
  /// Blocks until no op still reads or writes what is asked for. `write_weights`: the caller changes working copy and
  /// state now, every device copy becomes stale.
  void access_home(UnitId unit, bool write_weights);
  /// The caller writes the held gradient on the stream, after whoever still reads it.
  void access_held(UnitId unit, Stream stream);
  /// Why weights and state do not belong together any more; empty: they do.
  std::string torn() const;
  /// All of them have been loaded.
  void mend();

  /// Memory for gradients that are not summed over the ranks, by unit. Ends a forward that is open.
  void hold_unsummed(const std::vector<std::byte*>& memory, Stream stream);
  bool holds_unsummed() const { return holds_unsummed_; }
  void set_unsynced(bool unsynced);
  bool is_unsummed(UnitId unit, Bytes offset, Bytes bytes) const;
  bool is_summed(UnitId unit, Bytes offset, Bytes bytes) const;
  /// In a backward that ends: nothing more is summed after this, so that ranks can tell each other what has come.
  void end_sums(Stream stream);
  /// After that: gradients that some rank has had, by unit and offset.
  void gradients_came(const std::map<UnitId, std::set<Bytes>>& came);
  /// Everybody's numbers, by rank; where ranks share the home. Blocks until all that they do together is done. At the
  /// end of a backward, what came to held gradients while this rank assisted is known here from then on.
  std::vector<std::int64_t> exchange(std::vector<std::int64_t> numbers, Meeting meeting);

  void idle();
  void close();

  // ---- what happened ----
  std::vector<PassStats> passes() const;
  /// Passes of kinds that were not seen again for so long that they are no longer told apart.
  std::int64_t num_forgotten_passes() const { return forgotten_passes_; }
  StepSums step_sums() const;
  std::int64_t compute_us() const;  // inside visits, since the engine was made
  LaneStats update_stats() const;   // launching-thread updates or the pool's
  std::vector<UnitId> resident_units() const;
  const Leases& leases() const { return leases_; }
  std::size_t num_remembered() const;
  DraftCounts draft_counts() const;
  std::vector<std::string> wait_kinds() const;
  void omit_wait(const std::string& kind);
  void set_trace(std::shared_ptr<Trace> trace);
  const BufferTable& buffers() const { return buffers_; }
  std::int64_t num_fetches() const { return fetcher_.num_fetches(); }
  /// Of these, made at `step` for a forward that did not come next: they are in no pass's count.
  std::int64_t num_unclaimed_fetches() const { return unclaimed_fetches_; }

 private:
  struct Following {                       // the plan that is being played
    std::optional<ItineraryId> itinerary;  // none: this visit only
    std::shared_ptr<const PassPlan> plan;
    std::int64_t base = 0;  // visit 0 of the plan is this visit of the pass
    std::size_t next_op = 0;
  };
  struct OpenVisit {
    Visit visit;
    Op op;
    Ticket ticket;
    bool is_recomputed = false;  // by a forward inside of backward: not yet that unit's visit
    std::int64_t opened_us = 0;  // 0: issued, not yet waited for
    std::vector<Ticket> waits;
    std::vector<OpId> waited_on;  // for the trace
  };
  struct PassCount {
    std::int64_t first_fetch = 0;
    Bytes first_fetched;
    std::optional<std::int64_t> planned;
    std::int64_t unplanned_visits = 0;
    std::int64_t stall_us = 0;
    Bytes drained_before, brought_before, reduced_before;
  };

  /// What becomes of a unit's gradients as soon as they have landed: a draft, or sums.
  struct Early {
    UpdateJob job;             // expected
    Ticket ticket;             // null: not begun
    bool is_written = false;   // the gradient has been, or may have been
    bool is_recalled = false;  // to begin once the gradient is scaled
    bool is_scaled = false;    // the gradient has been, since it was read
    Bytes awaited;             // of gradients
    bool is_draft() const { return job.task == UpdateTask::update; }
  };

  /// See Note [Inside backward]. Vectors are by unit.
  struct InBackward {
    std::optional<GradientRing> ring;  // none: every unit has held memory of its own
    bool accumulating = false;
    bool is_counted = false;  // this pass: a backward, or a forward that one may follow
    std::vector<std::optional<ExpectedUpdate>> expected;
    std::vector<std::set<Bytes>> arriving;        // offsets of gradients that wait for their drain
    std::vector<std::set<Bytes>> come;            // of those drained since, that no update has used
    std::vector<std::optional<int>> slot;         // in the ring; none: it has none now, or a place of its own
    std::map<int, Ticket> reader;                 // by slot: of the update that read it last
    std::vector<std::int64_t> last_visit;         // in this backward, where that is known; else -1
    std::vector<int> visits_made;                 // in forwards, since the last backward
    std::vector<std::optional<int>> visits_left;  // in this backward, if its forwards tell
    std::vector<bool> is_updated;                 // in this backward
    struct Sums {
      Ticket update;
      GradientSums sums;
      std::vector<Bytes> gradients;  // by piece, their offsets
    };
    std::vector<Sums> sums;  // of the last update; where ranks share the home
    std::vector<Updated> unclaimed;
  };

  // Everything a plan depends on beyond the units: itinerary, position in it, successor, update before that, residents.
  using PlanKey = std::tuple<ItineraryId, std::int64_t, ItineraryId, bool, std::vector<Resident>>;

  std::shared_ptr<const PassPlan> plan_from(ItineraryId itinerary, std::int64_t position);
  std::vector<Visit> visits_after(ItineraryId itinerary) const;
  void follow(const Visit& visit);
  void play_until(std::int64_t visit_index);
  void issue_visit(const Visit& visit, const Op& planned);
  void begin_op(OpenVisit& open);
  void enter_visit(Stream stream);
  void await_in_visit(Stream stream);
  void go_on(Stream stream, const std::vector<Access>& accesses);
  enum class Visiting : std::uint8_t { ends, goes_on };
  void close_visit(Stream stream, Visiting visiting = Visiting::ends);
  void finish_user_op(Op op, Stream stream, const std::function<void()>& act = {});
  void continue_on(Stream stream);
  void land(const std::vector<UnitId>& units, Stream stream);
  void sum_rest(Stream stream);
  void expect(const Signature& signature);
  PassPlan plan(std::vector<Visit> visits, std::vector<Visit> next);
  std::vector<UnitId> end_pass_unlocked(Stream stream);
  void reset_unlocked(Stream stream);
  void prepare_next_forward();
  void drop_prepared();
  Op update_op(UnitId unit);
  void end_passes(Stream stream);
  enum class Stage : std::uint8_t { backward, step };  // that comes after the user's loop
  void note_edits(Stage stage, Stream stream, const std::vector<UnitId>& scaled = {},
                  const std::function<void()>& scale = {});
  void begin_early_work(std::optional<ItineraryId> expected);
  void recall_early();
  void gradient_is_written(UnitId unit);
  void write_held(UnitId unit, Stream stream);
  void draft(UnitId unit, Early& early);
  Ticket sum(UnitId unit, UpdateJob job);
  void drop_early(UnitId unit);
  void drop_all_early();
  int urgency_of(UnitId unit) const;
  std::optional<Early>& early_of(UnitId unit) { return early_[static_cast<std::size_t>(unit.value)]; }
  void change_places(UnitId unit);
  void drain_open();
  std::optional<int> take_slot();
  void hold(UnitId unit);
  Bytes held_bytes(UnitId unit) const;
  void release_held(UnitId unit);
  void refuse_updated(UnitId unit, const std::string& what);
  void note_visits(ItineraryId forward);
  void count_use(const std::vector<UnitId>& units);
  void count_back(UnitId unit);
  void begin_updating(std::optional<ItineraryId> expected);
  void update_complete(const Visit& visit, bool is_recomputed);
  void update_in_backward(UnitId unit);
  bool only_accumulates(UnitId unit) const;
  void update_rest(bool what_accumulates);
  void abandon_updating();
  void refuse_torn() const;
  /// p.grad shows what is held: the user's loop may read and edit it.
  bool shows_gradients() const { return !in_backward_ && !options_.lane; }
  std::int64_t update_us() const;
  EngineUnit& unit_of(UnitId unit) { return units_[static_cast<std::size_t>(unit.value)]; }

  const EngineOptions options_;
  const std::shared_ptr<Backend> backend_;
  std::vector<EngineUnit> units_;  // a commit exchanges home and spare
  std::vector<UnitFacts> facts_;
  BufferTable buffers_;
  Custodian& custodian_;
  const std::shared_ptr<HostOptimizer> optimizer_;  // null: updates run on the launching thread

  mutable std::recursive_mutex mutex_;  // recursive: a deferred update may ask for the home it updates
  Issuer issuer_;
  Leases leases_;
  std::optional<Collector> collector_;  // engaged: ranks share the home
  PeerCopies copies_;
  Fetcher fetcher_;
  Drainer drainer_;
  std::optional<Saver> saver_;  // engaged: saves
  ItineraryBook book_;
  std::map<PlanKey, std::shared_ptr<const PassPlan>> plans_;

  std::optional<Stream> stream_;  // where the compute lane is
  std::optional<Phase> phase_;
  Following following_;
  std::optional<Following> prepared_;  // the next forward's, when its opening was played at `step`
  std::vector<Resident> prepared_residents_;
  std::optional<OpenVisit> visit_;
  std::vector<UnitId> attached_;
  PassCount count_;
  PassCount prepared_count_;
  std::int64_t prepared_fetches_ = 0;
  std::int64_t unclaimed_fetches_ = 0;
  ItineraryId last_forward_;
  std::vector<bool> pending_;                // by unit: deferred to the launching thread
  std::vector<bool> has_scales_;             // by unit: its gradients have been multiplied by late scales, once
  std::vector<std::optional<Early>> early_;  // by unit
  std::vector<bool> moved_;                  // by unit
  std::vector<Ticket> committed_;  // by unit: of the draft that is its state, as long as nothing has come since
  std::vector<Bytes> landing_;     // by unit: of its gradients, what this backward has drained
  std::vector<std::int64_t> last_gradient_;   // by unit: the visit in which this backward is expected to bring the last
  std::vector<int> urgency_;                  // by unit: how early the next forward is expected to need it
  std::map<ItineraryId, bool> is_last_;       // by backward: an update followed before another backward did
  std::optional<ItineraryId> last_backward_;  // of which that is not known yet
  std::optional<InBackward> in_backward_;     // none: updates run after `step`, or as drafts
  std::string torn_;
  std::optional<std::vector<bool>> last_of_;  // by unit; see `set_last_of`
  bool is_early_ = false;                     // this backward is expected to be followed by an update
  bool may_recall_ = false;  // early work has been issued since the last time that all of it was recalled
  DraftCounts draft_counts_;
  const std::shared_ptr<LookCounts> looks_ = std::make_shared<LookCounts>();
  std::map<ItineraryId, PassStats> passes_;
  std::int64_t forgotten_passes_ = 0;
  StepSums sums_;
  const std::shared_ptr<UpdateTime> update_time_ = std::make_shared<UpdateTime>();
  struct FirstStep {  // when it ended
    StepSums sums;
    SavedStats saved;
    Bytes drained;
    std::int64_t update_us = 0;
    Bytes updated;
  };
  std::optional<FirstStep> first_step_;
  std::int64_t last_step_us_ = 0;
  LaneStats launching_updates_;
  std::shared_ptr<Trace> trace_;
  bool holds_unsummed_ = false;
  // Ranks have visited different units: what they expect next may differ from then on, and with it what they fetch
  // ahead.
  bool is_uneven_ = false;
  bool closed_ = false;
};

}  // namespace noria
