// The one place where waits come from.
//
// Every op names what it reads and writes; `issue` takes ops in issue order and returns what each must wait for: the
// last writer of what it reads (RAW), the last writer (WAW) and the readers since (WAR) of what it writes. What the
// order of a lane or another wait already implies is left out. No wait is written by hand anywhere else.
//
// Ownership: keeps what it needs of past ops, bounded by the number of distinct ranges in use, not by time.
// Threads: none of its own; the caller serialises.
//
// Note [Update lane]. The update lane is a pool: its ops are ordered by waits alone. Updates of one unit always
// conflict (each writes the unit's state), so they form a chain and count as a lane per unit when implied waits are
// dropped. So do its sums, which a draft need not wait for.
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
  Purpose purpose = Purpose::weights;  // of the waiter's buffer that made the wait necessary
};

/// "update -> fetch on working_copy (RAW)"
std::string kind_of(const Wait& wait, Verb waiter);

// Note [Assistance]. Whatever op of the collect lane is under way, the lane may meanwhile read working copies and write
// held gradients, of any unit, for other ranks that are elsewhere (comm/collect_lane.h). So whoever writes the ones or
// touches the others waits for the newest op of that lane. What the lane itself must wait for then is `before`.
class Hazards {
 public:
  explicit Hazards(const BufferTable& buffers);
  ~Hazards();

  /// The ops that `op` must wait for, newest first; `op.id` must grow from call to call. Verb::evict returns none.
  std::vector<Wait> issue(const Op& op);

  /// What an access would have to wait for if it were made now: nothing is noted.
  std::vector<OpId> before(const Access& access) const;

  /// Tests only: waits of this kind (see kind_of) are silently left out from now on. Empty: none.
  void omit(const std::string& kind);

  /// How many ranges and past ops are remembered: a steady state must not grow it.
  std::size_t num_remembered() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct WaitList {
  std::vector<std::vector<std::int64_t>> waits;  // by op: indices of the ops that it waits for
};

/// All waits of a whole list of ops, by index.
WaitList derive(const std::vector<Op>& ops, const BufferTable& buffers);

/// Proves a list of ops with its waits: every conflicting pair is ordered by lanes and waits, the order has no circle,
/// every read names the version last written, a lane is never asked to wait for what is queued behind it. Returns what
/// is wrong, one sentence each; empty means proven. Quadratic, for tests and `noria plan --check`.
std::vector<std::string> check(const std::vector<Op>& ops, const WaitList& waits, const BufferTable& buffers);

}  // namespace noria
