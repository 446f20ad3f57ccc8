// The way out and back of what forwards save for their backwards: to the host, and back ahead of the backward.
//
// Ownership: borrows issuer and backend from the engine, the custodian has the device memory; the memory in the home is
// the caller's. Order: as the fetcher's. Threads: the caller serialises; `leave` may block until the drain lane has
// caught up, so that what is saved cannot pile up on the device.
//
// Note [Bundles]. What one forward visit saves is a bundle. It goes out when a later visit has saved something too:
// what the backward needs first stays where it is. A backward visit takes the newest bundle of its module in the oldest
// forward that has one left, which is right for micro-batches that come back in the order in which they went, and
// brings the bundle before it as well. A guess that was wrong costs a wait, never a bit: whoever asks for a tensor that
// is not there gets it then (`await`).
//
// Note [Tokens]. Where torch's allocator puts a tensor is different each time, so a token stands for the memory on the
// device: a buffer of one byte in a place of its own, one for each storage that is saved now.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <optional>
#include <vector>

#include "engine/custodian.h"
#include "engine/issuer.h"
#include "store/range_pool.h"

namespace noria {

struct SavedStats {
  std::int64_t num_offloaded = 0, num_reloaded = 0;
  std::int64_t num_unforeseen = 0;  // of those reloaded: somebody had to wait for it there and then
  Bytes offloaded, reloaded;
  Bytes there, most_there;  // of what is saved now, on the device
};

class Saver {
 public:
  Saver(Issuer& issuer, Backend& backend, Custodian& custodian)
      : issuer_(issuer),
        backend_(backend),
        custodian_(custodian) {}

  /// More memory at home.
  void add_memory(std::byte* memory, Bytes bytes) { pool_.add(memory, bytes); }

  void begin_pass(Phase phase);
  /// A storage that the visit which is open has saved; none: there is no room for it at home.
  std::optional<SavedId> save(const std::byte* memory, Bytes bytes);
  /// The visit which is open has saved it too.
  void share(SavedId saved);
  /// Nobody will ask for it again.
  void forget(SavedId saved);

  /// A visit of this module begins: in a forward it saves from now on, in a backward it needs what it saved there.
  /// Returns what that reads; nothing where the visit that was entered last only goes on.
  std::vector<Access> enter(HookId hook, Phase phase, UnitId unit, Stream stream);
  /// The visit has ended on the stream.
  void leave(UnitId unit, Stream stream);
  /// Somebody asks for it: the stream waits until it lies on the device, if it does not yet.
  void await(SavedId saved, Stream stream);

  const SavedStats& stats() const { return stats_; }
  Bytes held() const { return pool_.taken(); }

 private:
  enum class State : std::uint8_t { there, leaving, away, coming };
  struct Entry {
    RangePool::Range range;
    BufferId copy, token;
    const std::byte* memory = nullptr;  // on the device; null: away
    Bytes bytes;
    State state = State::there;
    Ticket ticket;  // of the copy that goes on
    bool is_marked = false;
    bool is_wanted = false;     // by a backward that has begun: it stays
    bool is_forgotten = false;  // and let go as soon as no copy reads or writes it
  };
  struct Bundle {
    HookId hook;
    std::int64_t forward = 0;
    std::vector<SavedId> saved;
    bool is_used = false;
  };
  using Bundles = std::list<Bundle>;

  void offload(const Bundle& bundle, UnitId unit);
  void reload(const std::vector<SavedId>& wanted, UnitId unit, Stream stream);
  void await_leaving(std::size_t most, UnitId unit);
  void end_copy(SavedId saved);
  void let_go(SavedId saved);
  void note_there(Entry& entry, const std::byte* memory);
  void let_go_forgotten();
  void mark(UnitId unit, const std::vector<SavedId>& saved, Stream stream);
  Bundles::iterator next_used(HookId hook);
  /// It may be asked for still.
  bool is_alive(SavedId saved) const;
  bool is_any_alive(const Bundle& bundle) const;
  std::vector<SavedId> alive(const Bundle& bundle) const;
  Entry& at(SavedId saved) { return entries_.at(saved); }

  Issuer& issuer_;
  Backend& backend_;
  Custodian& custodian_;
  RangePool pool_;
  std::map<SavedId, Entry> entries_;
  std::int32_t next_id_ = 0;
  std::vector<std::int32_t> free_tokens_;
  std::int32_t num_tokens_ = 0;
  std::int64_t forward_ = 0;
  Bundles bundles_;                           // in the order of their visits
  bool is_inside_ = false;                    // of a visit
  std::optional<Bundle> open_;                // of the forward visit that is
  std::deque<Bundles::iterator> staying_;     // have not been sent out
  std::deque<std::vector<SavedId>> leaving_;  // by op
  std::vector<SavedId> forgotten_;            // while a copy goes on
  SavedStats stats_;
};

}  // namespace noria
