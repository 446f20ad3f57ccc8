// ActivationStore moves what forwards save off the device, to peers or to the host, and brings it back ahead of the
// backward.
//
// Ownership: borrows issuer and backend from the engine. The callbacks hold the device memory. The memory at home and
// the memory that peers lend are the caller's.
// Order: ops are issued in the order of the calls.
// Threads: the caller serialises. `enter` may block until a lane has caught up, so that saved tensors cannot pile up on
// the device. `await` and `shrink_peer` block.
//
// Note [Bundles]. A bundle is what one forward visit saves. Backwards are expected in the order in which they came the
// last time (plan/backward_order.h). The backwards of one module are expected in the order of its forwards, and each
// backward visits its modules in reverse. So the future is known, and Belady's rule chooses what leaves
// (plan/activation_plan.h). At least one bundle stays: the one that a backward needs first. Of the last bundle to
// leave, storages leave only until there is room enough. When a backward visit takes its bundle, the next bundles are
// already on their way back. A wrong guess costs a wait, never a bit: a tensor that is asked for and is not there is
// brought then (`await`).
//
// The room must hold the largest bundle twice, or UsageError is raised. The part of the room that is lent counts too.
// So more than the rest may lie on the device until the lent part is back.
//
// Note [Tokens]. torch's allocator puts a tensor in a different place each time it is reloaded. So ops do not name
// its address, but a token: a buffer of one byte that stands for it. Each storage that is saved now has one.
//
// Note [Unforeseen tensors]. A tensor may be asked for before it is back. The caller is then inside of a visit, and
// nothing that is queued waits for the end of that visit (plan/planner.h, Note [Issue points]). So a tensor at peers
// comes back on the peer lane, as usual. A tensor at home would have to stand on the fetch lane behind fetches made
// ahead, and behind the updates that these wait for. So the callbacks copy it at once, on the compute stream. Ops of
// the compute lane end in the order of their issue, so a new op cannot end before the visit that is open. Therefore
// there is no such op: the calling thread blocks until the stream has come so far.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/trace.h"
#include "engine/engine_callbacks.h"
#include "engine/issuer.h"
#include "engine/saved_places.h"
#include "plan/activation_plan.h"
#include "plan/backward_order.h"

namespace noria {

struct SavedStats {
  std::int64_t num_offloaded = 0, num_reloaded = 0;
  std::int64_t num_unforeseen = 0;  // of those reloaded: the caller had to wait for it
  Bytes offloaded, reloaded;
  Bytes offloaded_to_peers, reloaded_from_peers;  // of these
  Bytes there, most_there;                        // what is saved now and lies on the device
  Bytes saved, most_saved;                        // in all places
  Bytes at_peers, most_at_peers;
  Bytes largest;  // bundle
};

/// Describes a module's visits in forwards, by the host's clock. Units: microseconds. Each time is the least of all
/// visits, so it contains no stalls.
struct SavedByModule {
  std::int64_t num_visits = 0;  // that have saved something
  Bytes bytes;                  // of the largest of these visits
  Bytes expected;               // the same, since the room was set
  std::int64_t forward_us = 0;
  std::int64_t gap_us = 0;  // from the end of the visit to its backward
};

class ActivationStore {
 public:
  /// `room`: device memory for bundles; none: as few stay as overlap allows.
  ActivationStore(Issuer& issuer, Backend& backend, EngineCallbacks& callbacks, MoreHome more_home,
                  std::optional<Bytes> room)
      : issuer_(issuer),
        backend_(backend),
        callbacks_(callbacks),
        own_room_(room),
        room_(room),
        places_(issuer.buffers(), std::move(more_home)) {}

  /// From now on what leaves goes to peers first. Call once for each peer.
  void add_peer(const PeerMemory& peer) { places_.add_peer(peer); }
  /// From now on uses nothing of this peer beyond `left` bytes. Returns false if something that may be asked for still
  /// lies beyond. Returns true if nothing does, and no copy there still runs: it waits for copies of what is forgotten.
  /// So do not call it inside of a pass.
  bool shrink_peer(std::int32_t rank, Bytes left);
  /// Gives the whole room another size. None of it is lent. What modules save may be less from now on: they are seen
  /// anew. A bundle is too large only if each room so far was too small for it.
  void resize_room(Bytes room);
  /// Sets what is left of the room: the rest is lent.
  void set_room(Bytes room) {
    room_ = room;
    tell_trace();
  }
  /// From now on what these modules save goes to the home, even if peers have room. That room is for modules that it
  /// helps more.
  void send_home(std::set<HookId> hooks) { sent_home_ = std::move(hooks); }
  /// Sets the trace that gets samples of what lies where: when a visit ends, when a backward visit begins, and when the
  /// room changes. Null: no trace.
  void set_trace(std::shared_ptr<Trace> trace) { trace_ = std::move(trace); }

  /// `saves`: this is a forward after which a backward may come.
  void begin_pass(Phase phase, bool saves);
  /// Records a storage that the open visit has saved.
  SavedId save(const std::byte* memory, Bytes bytes);
  /// Records that the open visit has saved it too.
  void share(SavedId saved);
  /// The storage will not be asked for again.
  void forget(SavedId saved);

  /// Begins a visit of this module. In a forward the module saves from now on; in a backward it needs what it saved.
  /// Returns what the visit reads; empty if the visit that was entered last only goes on. Throws UsageError if a bundle
  /// is known to be too large for the room.
  std::vector<Access> enter(HookId hook, Phase phase, UnitId unit, Stream stream);
  /// The visit that was entered has waited for all that it needs.
  void opened(std::int64_t at_us);
  /// Returns how long calling threads have blocked in here since the last call.
  std::int64_t take_waited_us() { return std::exchange(waited_us_, 0); }
  /// The visit has ended on the stream.
  void leave(UnitId unit, Stream stream);
  /// Brings the storage if it is not on the device yet, and blocks until the stream may use it. See Note
  /// [Unforeseen tensors].
  void await(SavedId saved, Stream stream);

  const SavedStats& stats() const { return stats_; }
  Bytes held() const { return places_.at_home(); }
  const std::map<HookId, SavedByModule>& by_module() const { return by_module_; }

 private:
  enum class State : std::uint8_t { resident, offloading, offloaded, reloading };
  struct Entry {
    Extents extents;  // its place off the device; none: it has none
    BufferId token;
    const std::byte* memory = nullptr;  // on the device; null: away
    Bytes bytes;
    State state = State::resident;
    Ticket ticket;                        // of the copy under way
    std::optional<std::int64_t> forward;  // the only forward that saved it; none: several
    bool is_marked = false;               // a save op has named it
    bool is_wanted = false;               // a backward that has begun needs it, so it stays
    bool is_forgotten = false;            // is let go as soon as no copy reads or writes it
  };
  struct Bundle {
    HookId hook;
    std::int64_t forward = 0;
    std::vector<SavedId> saved;
    bool is_used = false;
    std::int64_t left_us = 0;  // when its visit ended
  };
  using Bundles = std::list<Bundle>;
  /// Holds sizes since the room was set.
  struct Seen {
    Bytes largest, most_saved;  // of a bundle; and of all at once
    std::set<HookId> modules;
  };
  /// Holds storages that go the same way, in one op.
  struct TransferBatch {
    std::vector<SavedId> saved;
    Op op;
    Transfer transfer;
  };
  struct PendingOffload {
    std::vector<SavedId> saved;
    Ticket ticket;
  };

  void tell_trace() const;
  void take_place(Entry& entry, bool goes_home);
  void give_back_place(Entry& entry);
  void offload(const std::vector<SavedId>& going, bool go_home, UnitId unit);
  /// Brings the storages that are away, and keeps the others on the device.
  void reload(const std::vector<SavedId>& wanted, UnitId unit, Stream stream);
  /// Makes device memory for the storages that are away, and keeps the others. Returns those to be brought.
  std::vector<SavedId> want(const std::vector<SavedId>& wanted, UnitId unit);
  /// Queues the copies back. Call it when no op uses that memory any more.
  void bring(const std::vector<SavedId>& coming, UnitId unit);
  Ticket submit(TransferBatch load, Lane lane, Verb verb, UnitId unit);
  void make_way(Bytes bytes, UnitId unit);
  void offload_until(Bytes more, Bytes room, UnitId unit);
  /// Offloads at least `least` bytes of the farthest bundle, or all of it if it has less.
  void offload_farthest(Bytes least, UnitId unit);
  void await_leaving(UnitId unit);
  void await_stream(Stream stream);
  void end_left();
  void end_copy(SavedId saved);
  void let_go(SavedId saved);
  void note_there(Entry& entry, const std::byte* memory);
  void let_go_forgotten();
  void mark(UnitId unit, const std::vector<SavedId>& saved, Stream stream);
  std::vector<Bundles::iterator> use(HookId hook);
  void refuse_large_bundle() const;
  Bytes expected_of(HookId hook) const;
  SavedRoom room() const { return {room_, seen_.largest}; }
  Bytes leaving_bytes() const;
  /// Returns true if it may still be asked for.
  bool is_alive(SavedId saved) const;
  bool is_any_alive(const Bundle& bundle) const;
  std::vector<SavedId> alive(const Bundle& bundle) const;
  /// Returns those that lie on the device, are not leaving, and are not needed by a backward that has begun.
  std::vector<SavedId> idle(const Bundle& bundle) const;
  Entry& at(SavedId saved) { return entries_.at(saved); }

  Issuer& issuer_;
  Backend& backend_;
  EngineCallbacks& callbacks_;
  std::optional<Bytes> own_room_;
  std::optional<Bytes> most_room_ = own_room_;  // that it has ever been
  std::optional<Bytes> room_;                   // what is left of it
  Seen seen_;
  SavedPlaces places_;
  std::map<SavedId, Entry> entries_;
  std::int64_t next_id_ = 0;
  std::vector<std::int32_t> free_tokens_;
  std::int32_t num_tokens_ = 0;
  BackwardOrder order_;
  Bundles bundles_;                        // in the order of their visits
  bool saves_ = false;                     // in this pass
  bool is_inside_ = false;                 // of a visit
  std::optional<Bundle> open_;             // of the open forward visit
  std::deque<Bundles::iterator> staying_;  // they stay in whole or in part; in the order of their visits
  std::deque<PendingOffload> leaving_;     // in the order of issue
  std::vector<SavedId> forgotten_;         // but a copy is still under way
  std::int64_t entered_us_ = 0;
  std::int64_t waited_us_ = 0;
  std::vector<SavedId> awaited_;  // by the visit that was entered
  std::set<HookId> sent_home_;
  Ticket last_from_peers_;
  SavedStats stats_;
  std::map<HookId, SavedByModule> by_module_;
  std::shared_ptr<Trace> trace_;
};

}  // namespace noria
