// Engine follows the plan. TorchBridge owns it, and its hooks tell the engine what the model does now. The engine plays
// the ops that the plan has for this moment, gives and takes tickets, and counts. It has an owner for each part:
//
//   PassRunner       which plan is followed, and what happens when passes and visits begin and end
//   ComputeLane      the stream that the model computes on, and the op of the open visit
//   Fetcher, Drainer units on their way to the device, gradients on their way home
//   Updates          ops of updates, and those that the launching thread runs
//   StreamedUpdates  those that the device runs though state lies at home; a part of Updates
//   Drafts           work on gradients before `step` asks for it
//   BackwardUpdates  updates inside backward
//   Collector        what ranks that share the home do together
//   ActivationStore  what forwards save
//   PeerCopies       units at peers
//   StepStats        what happened
//   FileStates, FileWeights  state and frozen weights that lie in files
//
// Ownership: owns all of these. Shares the backend and the host optimizer. Borrows the callbacks, which must outlive
// it.
// Order: ops are issued in the order of the calls. The waits that `hazards` derives order all data between lanes;
// plan/hazards.h lists the waits of the host that it does not derive.
// Threads: one call at a time; a CallGate ensures it. `exchange` waits without the gate. A call may block until a
// fetch has arrived, an update is sealed, or gradients have landed. Never called with the GIL held.
//
// Note [Shards]. If ranks share the home, each rank has one shard of every unit's trainable bytes, and one of its
// frozen bytes. All ranks have shards of equal size. A fetch copies this rank's shard and gathers the shards of the
// others. Gradients are reduced over the ranks before this rank's shard is drained. Gathers and reductions are ops of
// the collect lane: a gather follows the fetch, a reduction comes before the drain. So ranks that run the same modules
// meet in the same order. If ranks run different modules, the lane assists (comm/collect_lane.h). An assisting rank may
// take sums into held gradients; it knows of them after the exchange that ends the backward. Updates of these gradients
// wait for that as for a drain, and a draft that was made before is dropped. `p.grad` does not show what is held.
//
// Gradients of a pass that is not synced (`set_unsynced`) are drained whole, to memory of their own. The next synced
// pass reduces a held gradient together with a new one that is added to it, and the rest at its end. An update inside
// backward that follows a sum learns from it, when the update begins, which gradients any rank has had.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/trace.h"
#include "device/backend.h"
#include "device/update_time.h"
#include "engine/activation_store.h"
#include "engine/backward_updates.h"
#include "engine/call_gate.h"
#include "engine/collector.h"
#include "engine/compute_lane.h"
#include "engine/drafts.h"
#include "engine/drainer.h"
#include "engine/fetcher.h"
#include "engine/issuer.h"
#include "engine/options.h"
#include "engine/pass_runner.h"
#include "engine/pass_state.h"
#include "engine/peer_copies.h"
#include "engine/step_stats.h"
#include "engine/unit_table.h"
#include "engine/updates.h"
#include "store/leases.h"

namespace noria {

class Engine {
 public:
  Engine(EngineOptions options, std::shared_ptr<Backend> backend, UnitMap<EngineUnit> units, BufferTable buffers,
         EngineCallbacks& callbacks, std::shared_ptr<HostOptimizer> optimizer);
  ~Engine();                       // closes backend and optimizer if they are open; does not throw
  Engine(const Engine&) = delete;  // others point into it
  Engine& operator=(const Engine&) = delete;

  // ---- passes ----
  void begin_pass(const Signature& signature, Stream stream);
  /// Begins a visit; see engine/pass_runner.h, Note [A visit]. `recomputes`: a forward inside of a backward announces
  /// this, to make activations again.
  void announce(HookId hook, const std::vector<UnitId>& needs, Phase phase, Stream stream, bool recomputes = false);
  /// Ends the visit. No module with a hook is entered any more.
  void leave(Stream stream);
  /// Call it before a gradient of this unit is written. Opens the unit's buffer if it is not open, and makes the stream
  /// wait for what the gradient is added to.
  void expect_gradient(UnitId unit, Stream stream);
  /// Call it after `expect_gradient`. Returns true if these bytes of the buffer are what the gradient is added to.
  bool is_brought(UnitId unit, Bytes offset, Bytes bytes) const;
  void gradient_arrived(UnitId unit, Bytes offset, Bytes bytes);
  /// Ends the pass. Returns the units whose gradients a backward has drained. If p.grad shows them, the stream waits
  /// until they have landed.
  std::vector<UnitId> end_pass(Stream stream);
  /// Ends a pass that raised. Leases of weights stay. Gradients that were not drained are lost.
  void reset(Stream stream);
  std::optional<Phase> phase() const;
  ItineraryId last_forward() const;
  /// Returns true if a visit is open that needs all of these units (sorted).
  bool is_visited(const std::vector<UnitId>& needs) const;
  /// Returns the units in the order in which the next forward is expected to need them. Units that it does not need
  /// come last.
  std::vector<UnitId> next_forward_order() const;

  // ---- updates ----
  /// Call it when the user's clip and edits of `held` are on the stream. `scale` queues there what writes the scales of
  /// these units' gradients. The engine calls `scale` when the stream waits for the readers of the former scales.
  void begin_step(Stream stream, const std::vector<UnitId>& scaled = {}, const std::function<void()>& scale = {});
  /// Returns sums of squares by piece of each job; every job has the task `sum`. The pool computes the sums that no
  /// draft has brought. Blocks until the last one is there. Call it when the edits of `held` by the user's loop are on
  /// the stream.
  std::vector<std::vector<double>> sum_gradients(std::vector<std::pair<UnitId, UpdateJob>> jobs, Stream stream);
  /// Queues `job`, or makes the unit's draft what `job` asks for. A smaller `priority` is more urgent.
  void update_on_pool(UnitId unit, UpdateJob job, int priority);
  /// The launching thread will run the unit's update when another op needs it.
  void defer_update(UnitId unit);
  /// Runs the unit's deferred update on this thread, if there is one.
  void run_deferred(UnitId unit);
  void run_all_deferred();
  /// `blocking`: waits until all updates are done.
  void end_step(bool blocking);
  /// Gives device memory to updates that run there, or takes it away (null), when all that wait have run.
  void set_update_slots(std::byte* memory, Bytes bytes_of_one, int num_slots);
  /// From now on the unit's deferred updates run on the device, in these pieces. None: on the launching thread.
  void set_update_pieces(UnitId unit, std::vector<StreamedUpdates::Piece> pieces);
  /// Returns the piece that `EngineCallbacks::update` updates now.
  StreamedUpdates::Now updated_now() const;
  /// Returns why weights and state do not belong together any more; empty if they do.
  std::string torn() const;
  /// Some units have been updated and others will not be. Passes and steps raise until weights and state are both
  /// loaded.
  void mark_torn(const std::string& why);
  /// Call it when all weights and all state have been loaded.
  void clear_torn();

  // ---- the home, seen from outside ----
  /// Blocks until no op still reads or writes what the caller asks for. `write_weights`: the caller changes working
  /// copy and state now, so every device copy becomes stale. `writes_frozen`: also of frozen weights.
  void access_home(UnitId unit, bool write_weights, bool writes_frozen = true);
  /// For a unit whose state lies in a file: blocks until the state has memory, and the caller may read it. `writes`:
  /// and write it. `holds`: until `release_states`; else until the state of other units needs the memory. Call
  /// `access_home` before.
  void access_state(UnitId unit, bool writes, bool holds);
  /// State in files is not held any more.
  void release_states();
  /// The caller reads the unit's weights at home. If they lie in a file, compares them with their checksums. If they
  /// were written since their last fetch, there is nothing to compare: `awaits_writes` waits until that is in the file.
  /// Blocks.
  void check_weights(UnitId unit, bool awaits_writes);
  struct LostWeights {
    UnitId unit;
    int times;  // that some of them were lost
    std::string why;
  };
  /// Returns the units whose weights in files are not what was written there.
  std::vector<LostWeights> lost_weights() const;
  /// All such weights of the unit were loaded again.
  void clear_lost_weights(UnitId unit);
  /// The caller writes the held gradient on the stream, after all ops that still read it.
  void access_held(UnitId unit, Stream stream);
  /// Like `access_held`, for a caller that will divide all gradients of the unit and then multiply them, as its draft
  /// may foresee. When that is done, the caller tells Drafts::end_scaling.
  void begin_scaling(UnitId unit, float divisor, float prefactor, Stream stream);
  /// The caller has put this rank's part of a sum over the ranks into the held gradient.
  void keep_gradient(UnitId unit, Bytes offset, Bytes bytes);
  /// The user has cleared this gradient, so no update will use it.
  void drop_gradient(UnitId unit, Bytes offset, Bytes bytes);

  // ---- update="backward" ----
  /// Gives memory for all gradients, by unit. Ends a forward that is open.
  void hold_all(const UnitMap<std::byte*>& held, Stream stream);
  /// Returns true if there is memory for all gradients.
  bool holds_all() const;
  /// Returns true if a gradient has come that no update has used, or that is not reduced yet.
  bool is_held_back(UnitId unit, Bytes offset) const;
  /// Returns the units whose update was issued inside backward and that BackwardUpdates::take_updated has not returned.
  std::vector<UnitId> unclaimed() const;
  /// Issues the updates at `step`, after passes that have only accumulated.
  void update_held(Stream stream);

  // ---- ranks that share the home ----
  /// Gives memory for gradients that are not reduced over the ranks, by unit. Ends a forward that is open.
  void hold_unreduced(const UnitMap<std::byte*>& memory, Stream stream);
  bool holds_unreduced() const;
  void set_unsynced(bool unsynced);
  bool is_unreduced(UnitId unit, Bytes offset, Bytes bytes) const;
  bool is_reduced(UnitId unit, Bytes offset, Bytes bytes) const;
  /// Sums what is left, in a backward that ends. No sum follows, so ranks can tell each other which gradients have
  /// come.
  void end_reductions(Stream stream);
  /// Returns the numbers of all ranks, by rank. Allowed only if ranks share the home. Blocks until all ranks have
  /// called it. After the exchange at the end of a backward, this engine knows the sums that were taken into held
  /// gradients while this rank assisted.
  std::vector<std::int64_t> exchange(std::vector<std::int64_t> numbers, SyncPoint point);

  // ---- what forwards save, and units at peers ----
  /// Brings what was saved if it is not on the device; see ActivationStore::await.
  void await_saved(SavedId saved, Stream stream);
  /// From now on keeps these units at peers. Not allowed if ranks share the home.
  void keep_copies(const std::vector<UnitId>& units);

  /// Ends an open pass, and gives the window's memory back to the device. All work on `stream` has ended. Until `wake`,
  /// no pass may begin, and `end_step` must not be called; the home may be read and written.
  void sleep(Stream stream);
  /// Takes the window's memory again. Throws MachineError if the device has no room: call it again later.
  void wake();
  /// Gives the window another size, before `wake`: as close to `arena` as all passes that are known allow. Returns that
  /// size.
  Bytes resize(Bytes arena);

  void set_trace(std::shared_ptr<Trace> trace);
  void idle();
  void close();

  // ---- its owners: what their headers list for callers of the engine. `Held` takes the gate, which clang does not
  // see. ----
  Held<Drafts> drafts() NORIA_UNCHECKED { return {gate_, drafts_}; }
  /// Only with update="backward".
  Held<BackwardUpdates> backward_updates() NORIA_UNCHECKED;
  /// Only if forwards may save.
  Held<ActivationStore> activations() NORIA_UNCHECKED;
  Held<PeerCopies> copies() NORIA_UNCHECKED { return {gate_, copies_}; }
  Held<const PassRunner> runner() const NORIA_UNCHECKED { return {gate_, runner_}; }
  Held<const Updates> updates() const NORIA_UNCHECKED { return {gate_, updates_}; }
  Held<const StepStats> stats() const NORIA_UNCHECKED { return {gate_, stats_}; }
  Held<const Fetcher> fetcher() const NORIA_UNCHECKED { return {gate_, fetcher_}; }
  Held<const Leases> leases() const NORIA_UNCHECKED { return {gate_, leases_}; }
  Held<Issuer> issuer() NORIA_UNCHECKED { return {gate_, issuer_}; }
  Held<const BufferTable> buffers() const NORIA_UNCHECKED { return {gate_, buffers_}; }
  /// Of a lane that reads or writes files. Counts nothing if nothing of it lies in files.
  LaneStats file_stats(Lane lane) const;
  /// Counts nothing if forwards may not save.
  SavedStats saved_stats() const;
  std::map<HookId, SavedByModule> saved_by_module() const;

 private:
  using Entry = CallGate::Entry;

  void end_open_pass(Stream stream) NORIA_REQUIRES(gate_);
  void sweep() NORIA_REQUIRES(gate_);
  void forget_failures() NORIA_REQUIRES(gate_);
  bool await_load(UnitId unit, const std::vector<Access>& more) NORIA_REQUIRES(gate_);
  void close_lanes();
  enum class Edits : std::uint8_t { before_backward, before_step };
  void note_edits(Edits edits, Stream stream, const std::vector<UnitId>& scaled = {},
                  const std::function<void()>& scale = {}) NORIA_REQUIRES(gate_);
  void run_all_deferred_locked() NORIA_REQUIRES(gate_);

  mutable CallGate gate_;
  EngineOptions options_;
  const std::shared_ptr<Backend> backend_;
  UnitTable units_ NORIA_GUARDED_BY(gate_);
  BufferTable buffers_ NORIA_GUARDED_BY(gate_);
  EngineCallbacks& callbacks_;
  const std::shared_ptr<HostOptimizer> optimizer_;  // null: updates run on the launching thread
  Issuer issuer_ NORIA_GUARDED_BY(gate_);
  Leases leases_ NORIA_GUARDED_BY(gate_);
  std::optional<Collector> collector_ NORIA_GUARDED_BY(gate_);  // set: ranks share the home
  const std::unique_ptr<FileStates> files_;                     // null: no state lies in files
  const EngineParts parts_;
  const std::unique_ptr<FileWeights> file_weights_;  // null: all weights lie in host memory
  PeerCopies copies_ NORIA_GUARDED_BY(gate_);
  Fetcher fetcher_ NORIA_GUARDED_BY(gate_);
  Drainer drainer_ NORIA_GUARDED_BY(gate_);
  std::optional<ActivationStore> activations_ NORIA_GUARDED_BY(gate_);  // set: what forwards save may leave
  const std::shared_ptr<UpdateTime> update_time_ = std::make_shared<UpdateTime>();
  PassState pass_ NORIA_GUARDED_BY(gate_);
  ComputeLane compute_ NORIA_GUARDED_BY(gate_);
  Updates updates_ NORIA_GUARDED_BY(gate_);
  Drafts drafts_ NORIA_GUARDED_BY(gate_);
  // None: updates run after `step`, or as drafts.
  std::optional<BackwardUpdates> backward_updates_ NORIA_GUARDED_BY(gate_);
  StepStats stats_ NORIA_GUARDED_BY(gate_);
  PassRunner runner_ NORIA_GUARDED_BY(gate_);
  std::shared_ptr<Trace> trace_ NORIA_GUARDED_BY(gate_);
  bool holds_unreduced_ NORIA_GUARDED_BY(gate_) = false;
  // Ranks have visited different units, and may expect different visits next. So `end_step` fetches nothing ahead.
  bool has_diverged_ NORIA_GUARDED_BY(gate_) = false;
  bool closed_ NORIA_GUARDED_BY(gate_) = false;
};

}  // namespace noria
