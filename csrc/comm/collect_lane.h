// CollectLane runs what all ranks do together, in the order of submission, on a thread of its own.
//
// Ownership: owns its thread. Shares the collectives and the backend, whose tickets it takes and gives.
// Order: first in, first out. So ranks that submit the same ops in the same order meet in each op.
// Threads: every member may be called from any thread. None takes the GIL.
// Only the lane's own thread and the announcer's use the collectives.
//
// Note [Agreement]. Before each op the ranks tell each other which op they are at, and at which version of the unit.
// Usually all ranks run the same modules, and an Announcer compares the ops as they are queued. If two ranks differ,
// all throw before the op begins.
//
// With `assists`, ranks may run different modules. Example: some ranks take a branch that skips a unit, and the other
// ranks gather this unit. Then the lane itself asks before each op. If all are at the same op, they do it. If not, all
// choose the same one of these ops, by a rule that lets ranks that have skipped units wait for the other ranks. Gathers
// come before reductions, and exchanges come last. In a forward the unit with the lowest number comes first, in a
// backward the unit with the highest. Ranks that are at the chosen op do it. The other ranks assist and stay at their
// own op. Then all tell each other again. An exchange is done when all ranks are at it, so ranks meet there even if
// some have skipped units.
//
// All ranks throw if ranks have different versions of a unit, or if their exchanges differ. They also throw if a
// backward has raised on some ranks alone, because that leaves sums of different batches. After a failure the lane asks
// nothing of the other ranks any more: what is queued fails with the same error.
//
// Note [Assistance]. For a gather, an assisting rank gives its shard, out of the home. For a reduction it adds nothing,
// and takes its shard of the sum into the held gradient. Neither is an op, so no waits are derived for it. The op that
// the lane is at brings them: `UnitShards`, made when that op was submitted. An op that is submitted later cannot be in
// the way. If it writes a working copy or touches a held gradient, it waits for the newest op of the lane
// (plan/hazards.h). If this rank assisted during an exchange, the engine submits an op afterwards, so that later ops
// can wait for it. Until an exchange reports them, the launching thread does not know of the sums that were taken into
// held gradients. If the rank's own sum comes before that, it is added to them.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "comm/agreement.h"
#include "comm/announcer.h"
#include "comm/collectives.h"
#include "comm/unit_shards.h"
#include "device/host_lane.h"

namespace noria {

/// Holds gathers, then a reduction if its `all` is not null. An op with an empty Collective is an op of this rank
/// alone.
struct Collective {
  std::vector<Gather> gathers;
  Reduction reduction;
  bool empty() const { return gathers.empty() && reduction.all == nullptr; }

  /// Returns how many bytes a rank receives from other ranks, at least. It sends the same number.
  Bytes received(const Shards& shards) const {
    Bytes bytes = reduction.received(shards);
    for (const Gather& each : gathers) bytes += each.received(shards);
    return bytes;
  }
};

/// Says where this rank stands when it submits an op.
struct RankPosition {
  Phase phase = Phase::forward;
  std::int64_t version = 0;                       // of the unit's weights; see UnitShard
  std::shared_ptr<const UnitShards> unit_shards;  // null: this rank cannot assist
  std::int64_t num_broken = 0;                    // how many backwards that reduce gradients have raised
};

class CollectLane {
 public:
  /// `names`: of the units, for messages. `assists`: ranks may run different modules.
  CollectLane(std::shared_ptr<Backend> backend, std::shared_ptr<Collectives> collectives,
              std::vector<std::string> names, bool assists);

  Shards shards() const { return shards_; }
  bool assists() const { return !announcer_; }

  /// Queues `collective` after `waits`. Does not block.
  Ticket submit(const OpLabel& label, Collective collective, std::vector<Ticket> waits, RankPosition position = {});

  struct Met {
    std::vector<std::int64_t> numbers;  // of all ranks, by rank, one rank's behind the other
    std::vector<UnitId> taken;          // at the end of a backward: units whose sums were taken since the last one
    bool has_diverged = false;          // some ranks have assisted since the last exchange; the same on all ranks
    bool has_assisted = false;          // this rank has assisted while it waited; no op of the lane stands for that
  };
  /// Blocks until all that was submitted before is issued here, and all ranks have called this. Of `position` only
  /// unit_shards and num_broken are used.
  Met exchange(std::vector<std::int64_t> numbers, SyncPoint point, const RankPosition& position = {});
  /// Forgets the sums that were taken: the backward has raised, so no exchange will report them.
  void forget_taken();

  void idle() { thread_.idle(); }
  /// Stops the lane and releases the collectives.
  void close() {
    if (announcer_) announcer_->close();
    thread_.close();
    collectives_.reset();
  }

 private:
  using Failed = std::function<void(std::exception_ptr)>;

  /// Queues `act`. Calls `failed` if `act` throws, if the lane has failed before, or if it is closed.
  void enqueue(std::function<void()> act, const Failed& failed);
  /// Holds what an op learns from the other ranks.
  struct Agreed {
    Wanting wanting;                    // the ranks that are at this op; empty: all are
    bool has_assisted = false;          // before this op
    std::vector<std::int64_t> numbers;  // of all ranks, if they exchange numbers for this op
  };
  /// Returns a function that blocks until the ranks agree on this op. The lane's own thread calls it.
  using Agree = std::function<Agreed()>;
  Agree agree(const Intent& own, std::vector<std::int64_t> numbers, OpId op, const RankPosition& position);
  void run(const OpLabel& label, Collective collective, const std::vector<Ticket>& waits, const RankPosition& position,
           const Agree& agreed);
  /// Assists until this rank's op is the chosen one.
  Agreed meet(const Intent& own, OpId op, const UnitShards* unit_shards);
  void agree_on_version(const std::vector<Intent>& all, const Intent& chosen, const UnitShard* shard);
  void assist(const Intent& chosen, const Wanting& wanting, OpId op, const UnitShard& shard);

  const std::shared_ptr<Backend> backend_;
  std::shared_ptr<Collectives> collectives_;
  const int rank_;
  const Shards shards_;
  std::optional<Announcer> announcer_;  // null: this rank assists
  std::optional<Agreement> agreement_;  // null: the announcer has its own
  Mutex order_;                         // held while an op is announced and queued, so that both are in the same order
  std::exception_ptr failure_;          // the first; lane thread only
  std::set<std::int64_t> taken_;        // units; lane thread only
  bool has_diverged_ = false;           // lane thread only
  HostLane thread_;                     // last: it is destroyed before what it uses
};

}  // namespace noria
