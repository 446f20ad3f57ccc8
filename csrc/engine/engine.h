// Engine follows the plan. TorchBridge owns it, and its hooks tell the engine what the model does now. The engine plays
// the ops that the plan has for this moment, gives and takes tickets, and counts.
//
// Ownership: owns issuer, leases, fetcher, drainer, collector, saver and the copies at peers. Shares the backend and
// the host optimizer. Borrows the callbacks, which must outlive it.
// Order: ops are issued in the order of the calls. Nothing else orders them but the waits that `hazards` derives.
// Threads: one call at a time; a mutex ensures it. A call may block until a fetch has arrived, an update is sealed, or
// gradients have landed. Never called with the GIL held.
//
// Note [A visit]. `announce` first ends the visit before: the engine gives its compute ticket, evicts its units
// from their parameters, and drains the gradients that arrived. Then the engine issues the ops that the plan has for
// the new visit, makes the stream wait for what the visit reads, and attaches the visit's units. If the units are
// attached already, no new visit begins. Sometimes the plan did not foresee a visit or a gradient (another branch, for
// example). Then the engine plans it on the spot from what lies on the device now, and learns it when the pass ends.
//
// Note [The compute lane]. The compute lane is the stream that is current at the hook. If the current stream changes,
// the new stream first waits for all that is on the old one. So the lane stays a queue.
//
// Note [Drafts]. A draft is the update that is expected to follow. The pool computes it as soon as the unit's gradients
// have landed, from the unit's state into spare buffers. `step` asks for the same update in place. If there is a draft,
// unit and spare change places. The update is then computed anew in three cases only: `step` asks for other
// hyperparameters; the gradient was written since (torch tells) and its bytes differ; or it was first scaled, then
// written, so that its bytes cannot be compared. Nothing is rolled back,
// because no op reads a draft until it is committed. A look at the home drops a draft, and so does another backward. If
// a schedule tells which backwards are the last, another backward drops the draft only if it brings the unit another
// gradient.
//
// Note [Last gradients]. The engine learns which backward is the last before a step: if a step followed a backward, a
// step is expected to follow the same kind of backward the next time. A pipeline's schedule knows this for each stage,
// and says so (`set_last_of`). Then the next backward drafts, or updates inside, only the units of that stage. Other
// units only accumulate. The schedule divides gradients after that backward, so the draft's scalars contain this
// division. If the draft began before the division, `end_scaling` changes its record to describe the gradient as it is
// then. If it has not begun, it reads the divided gradient.
//
// Note [Inside backward]. With a gradient ring, held gradients lie in the ring alone. The exception is a unit whose
// gradients come in parts: it has a place of its own. A unit is updated in place as soon as its gradients are complete,
// and `step` only hears of it (`take_updated`). Gradients are complete after the unit's last visit. Two things tell
// which visit is the last: the backward that is expected, and the number of visits that the forwards made. If both are
// known, both must agree that no visit is left. Units that are left are updated at the end of the pass. A gradient or a
// visit that comes after the update cannot be undone. So it raises, and the weights are torn. They are also torn if a
// backward raises after an update of the same step, in this backward or an earlier one. Passes that only accumulate
// need memory for all gradients (`hold_all`). After that call the ring is not used any more.
//
// Note [Shards]. If ranks share the home, each rank has one part of every unit: a part of its trainable bytes, and a
// part of its frozen bytes. All ranks have parts of equal size. A fetch copies this rank's part and gathers the parts
// of the others. Gradients are summed over the ranks before this rank's part is drained. Gather and sum are ops of the
// collect lane: a gather follows the fetch, a reduction comes before the drain. So ranks that run the same modules meet
// in the same order. If ranks run different modules, the lane assists (comm/collect_lane.h). An assisting rank may take
// sums into held gradients; it knows of them after the exchange that ends the backward. Updates of these gradients wait
// for that as for a drain, and a draft that was made before is dropped. `p.grad` does not show what is held.
//
// Gradients of a pass that is not synced (`set_unsynced`) are drained whole, to memory of their own. The next synced
// pass adds gradients that come again to these, and sums the others at its end. An update inside backward that follows
// a sum learns from it, when the update begins, which gradients any rank has had.
//
// Note [Updates]. An update is an op on the update lane. On the pool it is issued at `step`, and the fetch that needs
// it waits for it. On the launching thread (kernel="torch") it is issued when another op needs what it reads or writes:
// `settle`. Either way the unit's version rises at `step`, so no device copy of it counts as current. An update
// inside backward raises it there.
//
// Note [Hidden updates]. The time of an update counts as behind a pass while the compute lane is at one of the pass's
// visits. It counts as exposed while that lane waits, for any reason, and outside of passes: in `step`, and in what the
// loop does between passes. The lane's own clock tells what the lane does (device/cuda_times.h). On a device, what the
// lane has done last is known a little later.
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
#include "engine/drainer.h"
#include "engine/engine_callbacks.h"
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
  bool prefetch_at_step = true;       // fetch the next forward's first units when `step` has queued their updates
  std::optional<GradientRing> ring;   // set: updates run inside backward; see Note [Inside backward]
  std::shared_ptr<CollectLane> lane;  // set: ranks share the home; see Note [Shards]
  CollectScratch scratch;             // for the lane
  bool saves = false;                 // what forwards save may leave the device; see engine/saver.h
  std::optional<Bytes> saved_room;    // device memory for what stays; none: as little as overlap allows
};

/// Counts what one kind of pass did, for the report.
struct PassStats {
  ItineraryId itinerary;
  Signature signature;
  std::int64_t num_visits = 0;
  std::int64_t times = 0;
  std::optional<std::int64_t> planned_fetches;  // of the last occurrence; none: it had no plan, or left it
  std::int64_t fetches = 0;                     // of the last occurrence
  std::int64_t unplanned_visits = 0;            // of all occurrences
};

/// Sums over the `num_steps` steps that ended after the first one. Until the first one has ended: over all so far.
struct StepSums {
  std::int64_t num_steps = 0;
  std::int64_t wall_us = 0;
  std::int64_t forward_us = 0, backward_us = 0;  // inside visits, by the clock of the compute lane
  std::int64_t forward_stall_us = 0, backward_stall_us = 0;
  Bytes forward_fetched, backward_fetched, drained, reduced;  // reduced: received from other ranks, to be summed
  Bytes copied;                                               // between home and device, both ways, all kinds
  Bytes updated;                                              // read and written by the pool
  std::int64_t forward_fetch_us = 0, backward_fetch_us = 0, drain_us = 0, offload_us = 0, peer_us = 0;
  std::int64_t forward_collect_us = 0, backward_collect_us = 0;
  std::int64_t update_us = 0;  // the sum of the next three; see Note [Hidden updates]
  std::int64_t update_behind_forward_us = 0, update_behind_backward_us = 0, update_exposed_us = 0;
};

/// Counts drafts that were begun: kept as they were, kept after a look at the gradient, redone with what `step` asked
/// for, or dropped.
struct DraftCounts {
  std::int64_t kept = 0, looked_at = 0, redone = 0, dropped = 0;
  // Of those looked at so far: the gradient was the same; it differed, and the update was computed anew.
  std::int64_t unchanged = 0, changed = 0;
};

class Engine {
 public:
  Engine(EngineOptions options, std::shared_ptr<Backend> backend, std::vector<EngineUnit> units, BufferTable buffers,
         EngineCallbacks& callbacks, std::shared_ptr<HostOptimizer> optimizer);
  ~Engine();                       // closes backend and optimizer if they are open; does not throw
  Engine(const Engine&) = delete;  // others point into it
  Engine& operator=(const Engine&) = delete;

  // ---- passes ----
  void begin_pass(const Signature& signature, Stream stream);
  /// `recomputes`: a forward inside of a backward announces this, to make activations again.
  void announce(HookId hook, const std::vector<UnitId>& needs, Phase phase, Stream stream, bool recomputes = false);
  /// Ends the visit. No other visit begins (the outermost module returned, or a block did).
  void leave(Stream stream);
  /// Call it before a gradient of this unit is written. Opens the unit's buffer if it is not open, and makes the stream
  /// wait for what the gradient is added to.
  void expect_gradient(UnitId unit, Stream stream);
  /// Call it after `expect_gradient`. Returns true if these bytes of the buffer are what the gradient is added to.
  bool is_brought(UnitId unit, Bytes offset, Bytes bytes) const;
  void gradient_arrived(UnitId unit, Bytes offset, Bytes bytes);
  /// Ends the pass. After a backward the stream waits until all gradients have landed. Returns their units.
  std::vector<UnitId> end_pass(Stream stream);
  /// Ends a pass that raised. Leases stay. Gradients that were not drained are lost.
  void reset(Stream stream);
  /// The copies of this unit, on the device and at peers, are not what the home holds. They are never used again.
  void forget(UnitId unit);
  std::optional<Phase> phase() const;
  /// Returns true if a visit is open that needs all of these units (sorted).
  bool is_visited(const std::vector<UnitId>& needs) const;
  ItineraryId last_forward() const { return last_forward_; }
  /// In a backward: returns true if it is expected to be the last before a step.
  bool expects_step() const;

  // ---- updates ----
  /// Call it when the user's clip and edits of `held` are on the stream. `scale` queues there what writes the scales of
  /// these units' gradients. The engine calls `scale` when the stream waits for the readers of the former scales.
  void begin_step(Stream stream, const std::vector<UnitId>& scaled = {}, const std::function<void()>& scale = {});
  /// Tells what `step` will ask for if nothing changes until then: an update out of place, or the sums alone. The pool
  /// does it when the gradients have landed, if this backward is expected to be the last before a step. A draft needs a
  /// spare.
  void expect_update(UnitId unit, UpdateJob job);
  /// Tells that the next backward brings these units their last gradients before a step. Other units will get more.
  /// None: this is not known. Holds until the next call.
  void set_last_of(const std::optional<std::vector<UnitId>>& units);
  /// Like `access_held`, for a caller that does to the gradient what the drafts of it foresee. When that is done, the
  /// caller tells `end_scaling` what it was.
  void begin_scaling(UnitId unit, Stream stream);
  void end_scaling(UnitId unit, float divisor, float prefactor);
  /// Returns true if early work reads this unit's gradients, or has read them. A caller that writes them must then call
  /// `access_held` first.
  bool is_read_early(UnitId unit) const;
  /// Returns sums of squares by piece of each job; every job has the task `sum`. The pool computes the sums that no
  /// draft has brought. Blocks until the last one is there. Call it when the edits of `held` by the user's loop are on
  /// the stream.
  std::vector<std::vector<double>> sum_gradients(std::vector<std::pair<UnitId, UpdateJob>> jobs, Stream stream);
  /// Returns true if working copy and state lie where the spare was at first.
  bool is_moved(UnitId unit) const { return moved_[static_cast<std::size_t>(unit.value)]; }
  /// Queues `job`, which is in place. A smaller `priority` is more urgent. Returns true if a draft was committed:
  /// working copy and state now lie where the spare was.
  bool update_on_pool(UnitId unit, UpdateJob job, int priority);
  // ---- update="backward" ----
  /// Holds an update. By piece, `gradients` tells where the piece's gradient lies in facts.gradients.
  struct ExpectedUpdate {
    UpdateJob job;
    std::vector<Bytes> gradients;
  };
  /// Sets the update of this unit for the backward that begins. Pieces whose gradients do not come are left out.
  void expect_in_backward(UnitId unit, ExpectedUpdate update);
  /// From now on passes only accumulate, or no longer do.
  void set_accumulating(bool accumulating);
  bool holds_all() const;
  /// Gives memory for all gradients, by unit. Ends a forward that is open.
  void hold_all(const std::vector<std::byte*>& held, Stream stream);
  /// Returns true if a gradient has come that no update has used.
  bool is_held_back(UnitId unit, Bytes offset) const;
  /// The user has cleared this gradient, so no update will use it.
  void drop_gradient(UnitId unit, Bytes offset, Bytes bytes);
  /// Returns the units whose update was issued inside backward, and that `take_updated` has not returned yet.
  std::vector<UnitId> unclaimed() const;
  /// Some units have been updated and others will not be. Passes and steps raise until weights and state are both
  /// loaded.
  void tear(const std::string& why);
  /// Forgets the updates that were expected of earlier backwards. Call it before a backward that updates.
  void forget_expected();
  /// Issues the updates at `step`, after passes that have only accumulated.
  void update_held(Stream stream);
  struct Updated {
    UnitId unit;
    std::vector<std::pair<Bytes, UpdateScalars>> pieces;  // offset of the gradient
    std::set<Bytes> come;                                 // those that this rank knew of when the update was issued
  };
  std::vector<Updated> take_updated(const std::set<UnitId>& units);
  /// Returns sums of the squares of gradients that the unit's last update inside backward has used, by offset. If ranks
  /// share the home, the sums are of this rank's part. Blocks until that update is done.
  std::map<Bytes, double> sums_in_backward(UnitId unit);

  void defer_update(UnitId unit);
  void end_step(bool blocking);
  /// Runs the unit's deferred update on this thread, if there is one.
  void settle(UnitId unit);
  void settle_all();
  /// Returns the units in the order in which the next forward is expected to need them. Units that it does not need
  /// come last.
  std::vector<UnitId> next_forward_order() const;

  // ---- what forwards save ----
  void add_peer(const PeerMemory& peer);
  bool shrink_peer(std::int32_t rank, Bytes left);
  void send_saved_home(std::set<HookId> hooks);
  void set_saved_room(Bytes room);
  /// The members from here to `saved_by_module` do what the saver's do.
  SavedId save(const std::byte* memory, Bytes bytes);
  void share_saved(SavedId saved);
  void await_saved(SavedId saved, Stream stream);
  void forget_saved(const std::vector<SavedId>& saved);
  SavedStats saved_stats() const;
  std::map<HookId, SavedByModule> saved_by_module() const;

  // ---- units at peers: see PeerCopies ----
  void add_copy_peer(const PeerMemory& peer);
  void shrink_copy_peer(std::int32_t rank, Bytes left);
  /// Not allowed if ranks share the home.
  void keep_copies(const std::vector<UnitId>& units);
  CopyStats copy_stats() const;
  /// Returns the number of fetches by unit, from the home and from peers.
  std::vector<std::int64_t> times_fetched() const;

  // ---- the home, seen from outside ----
  /// Blocks until no op still reads or writes what the caller asks for. `write_weights`: the caller changes working
  /// copy and state now, so every device copy becomes stale.
  void access_home(UnitId unit, bool write_weights);
  /// The caller writes the held gradient on the stream, after all ops that still read it.
  void access_held(UnitId unit, Stream stream);
  /// Returns why weights and state do not belong together any more; empty if they do.
  std::string torn() const;
  /// Call it when all weights and all state have been loaded.
  void mend();

  /// Gives memory for gradients that are not summed over the ranks, by unit. Ends a forward that is open.
  void hold_unsummed(const std::vector<std::byte*>& memory, Stream stream);
  bool holds_unsummed() const { return holds_unsummed_; }
  void set_unsynced(bool unsynced);
  bool is_unsummed(UnitId unit, Bytes offset, Bytes bytes) const;
  bool is_summed(UnitId unit, Bytes offset, Bytes bytes) const;
  /// Sums what is left, in a backward that ends. No sum follows, so ranks can tell each other which gradients have
  /// come.
  void end_sums(Stream stream);
  /// Call it after `end_sums`, with the gradients that any rank has had, by unit and offset.
  void gradients_came(const std::map<UnitId, std::set<Bytes>>& came);
  /// Returns the numbers of all ranks, by rank. Allowed only if ranks share the home. Blocks until all that the ranks
  /// do together is done. After the exchange at the end of a backward, this engine knows the sums that were taken into
  /// held gradients while this rank assisted.
  std::vector<std::int64_t> exchange(std::vector<std::int64_t> numbers, Meeting meeting);

  void idle();
  void close();

  // ---- what happened ----
  std::vector<PassStats> passes() const;
  /// Returns the number of passes whose kinds have been forgotten, because they did not come again for long.
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
  /// Of these, the fetches made at `step` for a forward that did not come next. No pass counts them.
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
    bool is_recomputed = false;  // announced by a forward inside of backward: not yet the unit's backward visit
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

  /// Describes what is done with a unit's gradients as soon as they have landed: a draft, or sums.
  struct Early {
    UpdateJob job;             // expected
    Ticket ticket;             // null: not begun
    bool is_written = false;   // the gradient has been written, or may have been
    bool is_recalled = false;  // it begins when the gradient has been scaled
    bool is_scaled = false;    // the gradient has been scaled since it was read
    Bytes awaited;             // of gradients that must land first
    bool is_draft() const { return job.task == UpdateTask::update; }
  };

  /// See Note [Inside backward]. Vectors are by unit.
  struct InBackward {
    std::optional<GradientRing> ring;  // none: every unit has held memory of its own
    bool accumulating = false;
    bool is_counted = false;  // this pass is a backward, or a forward that a backward may follow
    std::vector<std::optional<ExpectedUpdate>> expected;
    std::vector<std::set<Bytes>> arriving;        // offsets of gradients that wait for their drain
    std::vector<std::set<Bytes>> come;            // offsets of gradients that were drained and that no update has used
    std::vector<std::optional<int>> slot;         // in the ring; none: no slot now, or a place of its own
    std::map<int, Ticket> reader;                 // by slot: ticket of the update that read it last
    std::vector<std::int64_t> last_visit;         // in this backward; -1: not known
    std::vector<int> visits_made;                 // in forwards, since the last backward
    std::vector<std::optional<int>> visits_left;  // in this backward; none: the forwards do not tell
    std::vector<bool> is_updated;                 // in this backward
    struct Sums {
      Ticket update;
      GradientSums sums;
      std::vector<Bytes> gradients;  // by piece: the offset of its gradient
    };
    std::vector<Sums> sums;  // of the last update; filled if ranks share the home
    std::vector<Updated> unclaimed;
  };

  // Holds all that a plan depends on beyond the units: itinerary, position in it, successor, whether an update comes
  // before that, residents.
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
  enum class Stage : std::uint8_t { backward, step };  // what comes after the user's loop
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
  /// Returns true if p.grad shows what is held, so that the user's loop may read and edit it.
  bool shows_gradients() const { return !in_backward_ && !options_.lane; }
  std::int64_t update_us() const;
  EngineUnit& unit_of(UnitId unit) { return units_[static_cast<std::size_t>(unit.value)]; }

  const EngineOptions options_;
  const std::shared_ptr<Backend> backend_;
  std::vector<EngineUnit> units_;  // a commit exchanges home and spare
  std::vector<UnitFacts> facts_;
  BufferTable buffers_;
  EngineCallbacks& callbacks_;
  const std::shared_ptr<HostOptimizer> optimizer_;  // null: updates run on the launching thread

  mutable std::recursive_mutex mutex_;  // recursive: a deferred update may ask for the home it updates
  Issuer issuer_;
  Leases leases_;
  std::optional<Collector> collector_;  // set: ranks share the home
  PeerCopies copies_;
  Fetcher fetcher_;
  Drainer drainer_;
  std::optional<Saver> saver_;  // set: what forwards save may leave
  ItineraryBook book_;
  std::map<PlanKey, std::shared_ptr<const PassPlan>> plans_;

  std::optional<Stream> stream_;  // the compute lane
  std::optional<Phase> phase_;
  Following following_;
  std::optional<Following> prepared_;  // the next forward's, if its opening was played at `step`
  std::vector<Resident> prepared_residents_;
  std::optional<OpenVisit> visit_;
  std::vector<UnitId> attached_;
  PassCount count_;
  PassCount prepared_count_;
  std::int64_t prepared_fetches_ = 0;
  std::int64_t unclaimed_fetches_ = 0;
  ItineraryId last_forward_;
  std::vector<bool> pending_;                // by unit: deferred to the launching thread
  std::vector<bool> has_scales_;             // by unit: late scales have multiplied its gradients before
  std::vector<std::optional<Early>> early_;  // by unit
  std::vector<bool> moved_;                  // by unit
  std::vector<Ticket> committed_;            // by unit: ticket of the last draft that was committed
  std::vector<Bytes> landing_;               // by unit: bytes of its gradients that this backward has drained
  std::vector<std::int64_t> last_gradient_;  // by unit: the visit expected to bring its last gradient
  std::vector<int> urgency_;                 // by unit: when the next forward needs it, as expected; smaller is earlier
  std::map<ItineraryId, bool> is_last_;      // by backward: an update followed, and no other backward before it
  std::optional<ItineraryId> last_backward_;  // for which that is not known yet
  std::optional<InBackward> in_backward_;     // none: updates run after `step`, or as drafts
  std::string torn_;
  std::optional<std::vector<bool>> last_of_;  // by unit; see `set_last_of`
  bool is_early_ = false;                     // this backward is expected to be followed by an update
  bool may_recall_ = false;                   // early work has been issued since all of it was last recalled
  DraftCounts draft_counts_;
  const std::shared_ptr<LookCounts> looks_ = std::make_shared<LookCounts>();
  std::map<ItineraryId, PassStats> passes_;
  std::int64_t forgotten_passes_ = 0;
  StepSums sums_;
  const std::shared_ptr<UpdateTime> update_time_ = std::make_shared<UpdateTime>();
  struct FirstStep {  // values at its end
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
  // Ranks have visited different units. From then on they may expect different visits next, and so fetch different
  // units ahead.
  bool is_uneven_ = false;
  bool closed_ = false;
};

}  // namespace noria
