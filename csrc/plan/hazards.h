// Derives every wait between ops on the same data from what they read and write; none is written by hand.
//
// Other waits are not derived here. The calling thread makes these:
// - when the compute stream changes (`ComputeLane::continue_on`);
// - if the device is full, until saved tensors have left it (`ActivationStore`);
// - if an unforeseen saved tensor is needed, until it is back (`ActivationStore`);
// - for copies that end before a peer has its memory back (`ActivationStore`, `PeerCopies`);
// - for sums that it reads (`Drafts`, `BackwardUpdates`), and for a step that blocks (`Engine`);
// - until all is idle: at the end, after a broken step (`Updates::clear_torn`), before memory is replaced or the
//   optimizer's state is shown.
//
// Example: a fetch writes a range of the window, so it waits for the forward that last read this range. Every op names
// what it reads and writes. `issue` takes ops in issue order and returns the ops that each must wait for:
// - for what it reads: the last writer (RAW);
// - for what it writes: the last writer (WAW), and the readers since that write (WAR).
// A wait is left out if the order of a lane, or another wait, already implies it.
//
// Ownership: keeps what it needs of past ops. Its memory depends on how many ranges are in use, not on how long
// training runs.
// Threads: none of its own; the caller serialises.
//
// Note [Update lane]. The update lane is a pool, so only waits order its ops. Updates of one unit always conflict,
// because each of them, and a draft, an undo or a load, writes the unit's state. So they form a chain, and a chain
// counts as a lane when implied waits are dropped. The sums of a unit form another chain, because a draft need not wait
// for them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace noria {

enum class Rule : std::uint8_t { read_after_write, write_after_write, write_after_read };

struct Wait {
  OpId on;
  Rule rule = Rule::read_after_write;
  Verb giver = Verb::fetch;
  Purpose purpose = Purpose::weights;  // of the waiter's buffer that caused the wait
};

/// Returns text such as "update -> fetch on working_copy (RAW)".
std::string kind_of(const Wait& wait, Verb waiter);

// Note [Assistance]. If the collect lane assists (comm/collect_lane.h), it may read working copies and write held
// gradients of any unit while an op of it runs. It does this for ranks that visit other units. So an op of another lane
// that writes a working copy, or touches a held gradient, waits for the newest op of the collect lane. `before` returns
// what the collect lane itself must wait for when it assists.
class Hazards {
 public:
  /// `assists`: see Note [Assistance]. Keeps a reference to `buffers`, which may grow.
  Hazards(const BufferTable& buffers, bool assists);
  ~Hazards();

  /// Returns the ops that `op` must wait for, newest first; none for Verb::evict. `op.id` must grow from call to call.
  std::vector<Wait> issue(const Op& op);

  /// Returns all ops that conflict with `access` now, oldest first, also those that a wait would imply. Records
  /// nothing.
  std::vector<OpId> before(const Access& access) const;

  /// Tests only: leaves out waits of this kind (see kind_of) from now on. An empty string omits none.
  void omit(const std::string& kind);

  /// Returns how many ranges and past ops are remembered. This must not grow in a steady state.
  std::size_t num_remembered() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct WaitList {
  std::vector<std::vector<std::int64_t>> waits;  // by op: indices of the ops that it waits for
};

/// Returns all waits of a whole list of ops, by index.
WaitList derive(const std::vector<Op>& ops, const BufferTable& buffers);

/// Proves that a list of ops with its waits is correct:
/// - lanes and waits order every conflicting pair;
/// - the order has no cycle;
/// - every read names the version last written;
/// - no op waits for an op that is queued behind it on the same lane.
/// Returns one sentence per fault; an empty result means proven. Takes quadratic time: for tests and `noria plan
/// --check`.
std::vector<std::string> check(const std::vector<Op>& ops, const WaitList& waits, const BufferTable& buffers);

}  // namespace noria
