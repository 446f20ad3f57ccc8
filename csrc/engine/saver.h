// The way out and back of what forwards save for their backwards: to peers or to the host, and back ahead of the
// backward.
//
// Ownership: borrows issuer and backend from the engine, the custodian has the device memory and finds more at home;
// what peers lend is the caller's. Order: as the fetcher's. Threads: the caller serialises; `enter` and `leave` may
// block until a lane has caught up, so that what is saved cannot pile up on the device.
//
// Note [Bundles]. What one forward visit saves is a bundle. Backwards are taken to come in the order in which they came
// the last time (backward_order.h), those of one module in the order of its forwards, and each visits its modules
// backwards. So the future is known, and who leaves is Belady's: of the bundles that stay, the one whose backward is
// farthest, the first of its forward. At least one stays: what a backward needs first. Of the last one to leave only as
// many storages do as are in the way. When a backward visit takes its bundle, those that come next are on their way. A
// guess that was wrong costs a wait, never a bit: whoever asks for a tensor that is not there gets it then (`await`).
// Two bundles must have room. Where they had it until some was lent, they have it still: there is more on the device
// then than the room, until the lender has got back what it asks for.
//
// Note [Tokens]. Where torch's allocator puts a tensor is different each time, so a token stands for the memory on the
// device: a buffer of one byte in a place of its own, one for each storage that is saved now.
//
// Note [What nobody foresaw]. Whoever asks is inside of a visit, and nothing that is queued waits for the end of that
// one (plan/planner.h, Note [Issue points]). So from peers it comes back on their lane, as ever. On the fetch lane it
// would stand behind fetches made ahead, and the updates that these wait for: from home it is copied by whoever asks.
// An op of the compute lane inside of the visit would say that the visit has ended when it has: so there is none, and
// whoever asks stands still until the stream has come so far.
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
#include "engine/backward_order.h"
#include "engine/custodian.h"
#include "engine/issuer.h"
#include "engine/saved_places.h"

namespace noria {

struct SavedStats {
  std::int64_t num_offloaded = 0, num_reloaded = 0;
  std::int64_t num_unforeseen = 0;  // of those reloaded: somebody had to wait for it there and then
  Bytes offloaded, reloaded;
  Bytes offloaded_to_peers, reloaded_from_peers;  // of these
  Bytes there, most_there;                        // of what is saved now, on the device
  Bytes saved, most_saved;                        // wherever it is
  Bytes at_peers, most_at_peers;
  Bytes largest;  // bundle
};

/// Of a module's visits in forwards, on the host's clock. Microseconds; the least of all visits: without stalls.
struct SavedByModule {
  std::int64_t num_visits = 0;  // that have saved something
  Bytes bytes;                  // of one
  std::int64_t forward_us = 0;
  std::int64_t gap_us = 0;  // to the backward
};

class Saver {
 public:
  /// `room`: for bundles on the device; none: as few stay as overlap allows.
  Saver(Issuer& issuer, Backend& backend, Custodian& custodian, std::optional<Bytes> room)
      : issuer_(issuer),
        backend_(backend),
        custodian_(custodian),
        own_room_(room),
        room_(room),
        places_(issuer.buffers(), custodian) {}

  /// From now on what leaves goes there first. Each peer once.
  void add_peer(const PeerMemory& peer) { places_.add_peer(peer); }
  /// From now on nothing of it is used beyond so many bytes. False: something lies there still, and nothing is known of
  /// its copies. True: nothing does, and those have passed, which it has waited for; so not inside of a pass.
  bool shrink_peer(std::int32_t rank, Bytes left);
  /// What is left of the room: the rest is lent.
  void set_room(Bytes room) {
    room_ = room;
    tell_trace();
  }
  /// What these modules save leaves for the home, also where peers have room: their room is for whom it helps more.
  void send_home(std::set<HookId> hooks) { sent_home_ = std::move(hooks); }
  /// Is told what lies where, at the ends of visits, where one of backward begins, and where the room changes; null:
  /// nobody.
  void set_trace(std::shared_ptr<Trace> trace) { trace_ = std::move(trace); }

  /// `saves`: a forward after which a backward may come.
  void begin_pass(Phase phase, bool saves);
  /// A storage that the visit which is open has saved.
  SavedId save(const std::byte* memory, Bytes bytes);
  /// The visit which is open has saved it too.
  void share(SavedId saved);
  /// Nobody will ask for it again.
  void forget(SavedId saved);

  /// A visit of this module begins: in a forward it saves from now on, in a backward it needs what it saved there.
  /// Returns what that reads; nothing where the visit that was entered last only goes on. Throws UsageError where a
  /// bundle is known to be too large for the room.
  std::vector<Access> enter(HookId hook, Phase phase, UnitId unit, Stream stream);
  /// The visit that was entered has waited for all that it needs.
  void opened(std::int64_t at_us);
  /// How long the calling thread has stood still in here since it was asked last.
  std::int64_t take_waited_us() { return std::exchange(waited_us_, 0); }
  /// The visit has ended on the stream.
  void leave(UnitId unit, Stream stream);
  /// Somebody asks for it: the stream waits until it lies on the device, if it does not yet.
  void await(SavedId saved, Stream stream);

  const SavedStats& stats() const { return stats_; }
  Bytes held() const { return places_.at_home(); }
  const std::map<HookId, SavedByModule>& by_module() const { return by_module_; }

 private:
  enum class State : std::uint8_t { there, leaving, away, coming };
  struct Entry {
    Stretches stretches;  // where it leaves to, or is; none: it is on the device, or comes
    BufferId token;
    const std::byte* memory = nullptr;  // on the device; null: away
    Bytes bytes;
    State state = State::there;
    Ticket ticket;                        // of the copy that goes on
    std::optional<std::int64_t> forward;  // whose it is alone
    bool is_marked = false;
    bool is_wanted = false;     // by a backward that has begun: it stays
    bool is_forgotten = false;  // and let go as soon as no copy reads or writes it
  };
  struct Bundle {
    HookId hook;
    std::int64_t forward = 0;
    std::vector<SavedId> saved;
    bool is_used = false;
    std::int64_t left_us = 0;  // when its visit ended
  };
  using Bundles = std::list<Bundle>;
  /// Storages that go the same way, with one op.
  struct Load {
    std::vector<SavedId> saved;
    Op op;
    Transfer transfer;
  };
  struct Leaving {
    std::vector<SavedId> saved;
    Ticket ticket;
  };

  void tell_trace() const;
  void take_place(Entry& entry, bool goes_home);
  void give_back_place(Entry& entry);
  void offload(const std::vector<SavedId>& going, bool go_home, UnitId unit);
  /// Brings those of these that are away, and keeps the others.
  void reload(const std::vector<SavedId>& wanted, UnitId unit, Stream stream);
  /// Makes memory for those of these that are away, and keeps the others. Returns the former, to be brought.
  std::vector<SavedId> want(const std::vector<SavedId>& wanted, UnitId unit);
  /// Once nobody uses their memory any more.
  void bring(const std::vector<SavedId>& coming, UnitId unit);
  Ticket submit(Load load, Lane lane, Verb verb, UnitId unit);
  void make_way(Bytes bytes, UnitId unit);
  /// Of the farthest bundle so many bytes at least, if it has them.
  void offload_farthest(Bytes least, UnitId unit);
  void await_leaving(UnitId unit);
  void await_stream(Stream stream);
  void end_left();
  void end_copy(SavedId saved);
  void let_go(SavedId saved);
  void note_there(Entry& entry, const std::byte* memory);
  void let_go_forgotten();
  void mark(UnitId unit, const std::vector<SavedId>& saved, Stream stream);
  Bundles::iterator next_used(HookId hook);
  Bundles::iterator needed_after(Bundles::iterator used);
  void refuse_large_bundle() const;
  Bytes expected_of(HookId hook) const;
  Bytes room() const;
  Bytes leaving_bytes() const;
  /// It may be asked for still.
  bool is_alive(SavedId saved) const;
  bool is_any_alive(const Bundle& bundle) const;
  std::vector<SavedId> alive(const Bundle& bundle) const;
  /// Those that lie on the device, and nothing has begun to bring away or to use.
  std::vector<SavedId> idle(const Bundle& bundle) const;
  /// Of these some that are so many bytes at least, and few more; all, where they are less.
  std::vector<SavedId> enough(std::vector<SavedId> saved, Bytes least) const;
  Entry& at(SavedId saved) { return entries_.at(saved); }

  Issuer& issuer_;
  Backend& backend_;
  Custodian& custodian_;
  const std::optional<Bytes> own_room_;
  std::optional<Bytes> room_;  // what of it is left
  SavedPlaces places_;
  std::map<SavedId, Entry> entries_;
  std::int64_t next_id_ = 0;
  std::vector<std::int32_t> free_tokens_;
  std::int32_t num_tokens_ = 0;
  BackwardOrder order_;
  Bundles bundles_;                        // in the order of their visits
  bool saves_ = false;                     // in this pass
  bool is_inside_ = false;                 // of a visit
  std::optional<Bundle> open_;             // of the forward visit that is
  std::deque<Bundles::iterator> staying_;  // in whole or in part, in the order of their visits
  std::deque<Leaving> leaving_;            // in the order of issue
  std::vector<SavedId> forgotten_;         // while a copy goes on
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
