// The collect lane: what all ranks do together, in the order of submission, on a thread of its own.
//
// Ownership: owns its thread, shares the backend, whose tickets it takes and gives, and the collectives. Order: first
// in, first out, so that ranks which submit the same ops in the same order meet in each. Threads: every member from any
// thread; never takes the GIL. The lane's own thread is the only one that calls the collectives.
//
// Note [Agreement]. Before each op the ranks tell each other which one they are at, and at which version of the unit.
// Where that is the same, they do it. Where it is not (a branch that only some take), all choose the same one of these
// ops, by a rule that lets ranks which have skipped units wait for those that have not: gathers before reductions,
// exchanges last; smaller units first in a forward, larger ones in a backward. Ranks that are at it do it, the others
// assist, and stay where they are; then they tell each other again. An exchange is done when all ranks are at it, so
// ranks meet there whatever they have skipped. A unit of which ranks have different versions, exchanges that differ,
// and a backward that has raised on some ranks alone, which leaves sums of different batches, raise on all ranks. After
// a failure nothing is asked of the others any more: what is queued fails with the same error.
//
// Note [Assistance]. To a gather an assisting rank gives its shard, out of the home; of a sum, to which it adds
// nothing, it takes its shard into the held gradient. Neither is an op of its own, so what it waits for comes with
// whatever op the lane is at: `Shares`, made when that was submitted. What is submitted later cannot be in the way:
// whoever writes a working copy or touches a held gradient waits for the newest op of the lane (plan/hazards.h); for
// what was done in an exchange, the engine submits one after it. Sums
// that were taken stand in the held gradient unknown to the launching thread until an exchange tells; a sum of the
// rank's own that comes before that is added to them.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "comm/shares.h"
#include "device/host_lane.h"

namespace noria {

/// Gathers, then a reduction if `all` of it is not null. Nothing at all: an op of this rank alone.
struct Collective {
  std::vector<Gather> gathers;
  Reduction reduction;
  bool empty() const { return gathers.empty() && reduction.all == nullptr; }

  /// What a rank gets from the others at least; as much it sends.
  Bytes received(const Shards& shards) const {
    Bytes bytes = reduction.received(shards);
    for (const Gather& each : gathers) bytes += each.received(shards);
    return bytes;
  }
};

/// What an op is submitted with: where this rank stands.
struct Standing {
  Phase phase = Phase::forward;
  std::int64_t version = 0;              // of the unit's weights; see Share
  std::shared_ptr<const Shares> shares;  // null: it cannot assist
  std::int64_t num_broken = 0;           // backwards that have raised, of those that sum
};

/// Where ranks exchange numbers: at the end of a backward, or for whatever the calling thread does next together
/// (a norm, `state_dict()`), as it then says itself.
enum class Meeting : std::uint8_t { backward, other };

class CollectLane {
 public:
  /// `names`: of units, for messages.
  CollectLane(std::shared_ptr<Backend> backend, std::shared_ptr<Collectives> collectives,
              std::vector<std::string> names);

  int rank() const { return rank_; }
  int size() const { return size_; }
  Shards shards() const { return shards_; }

  /// Queues `collective` after `waits`. Does not synchronize.
  Ticket submit(const OpLabel& label, Collective collective, std::vector<Ticket> waits, Standing standing = {});

  struct Met {
    std::vector<std::int64_t> numbers;  // everybody's, by rank, behind each other
    std::vector<UnitId> taken;          // at the end of a backward: units of which sums were taken since the last one
    bool was_uneven = false;            // some ranks have assisted others since the last exchange; so all ranks see it
    bool has_assisted = false;          // this rank, while it waited here: no op of the lane stands for that
  };
  /// Blocks until all that was submitted before is done, on all ranks. Of `standing` shares and num_broken count.
  Met exchange(std::vector<std::int64_t> numbers, Meeting meeting, const Standing& standing = {});
  /// The backward has raised: of sums that were taken nobody will hear.
  void forget_taken();

  void idle() { thread_.idle(); }
  /// Lets go of the collectives as well.
  void close() {
    thread_.close();
    collectives_.reset();
  }

 private:
  /// What a rank is about to do, as it tells the others.
  struct Intent {
    enum class Act : std::uint8_t { gather, reduce, exchange };
    Act act = Act::exchange;
    Phase phase = Phase::forward;
    std::int64_t subject = 0;  // the unit, or how many numbers
    std::int64_t version = 0;  // of the unit, or which meeting
    std::int64_t num_broken = 0;
    bool is_same_op(const Intent& other) const { return act == other.act && subject == other.subject; }
  };
  using Failed = std::function<void(std::exception_ptr)>;

  /// Queues `act`; `failed` hears of it if it throws, if the lane has failed before, or if it is closed.
  void enqueue(std::function<void()> act, const Failed& failed);
  void run(const OpLabel& label, Collective collective, const std::vector<Ticket>& waits, const Standing& standing);
  /// Assists until the others are at what this rank is about to do too, or let it; returns who is.
  struct Agreed {
    Wanting wanting;
    bool has_assisted = false;
  };
  Agreed meet(const Intent& own, OpId op, const Shares* shares);
  std::vector<Intent> tell(const Intent& own);
  void agree_on_version(const std::vector<Intent>& heads, const Intent& chosen, const Share* share);
  void assist(const Intent& chosen, const Wanting& wanting, OpId op, const Share& share);
  /// Of ranks `first` and `other`, which are about to do what does not go together.
  [[noreturn]] void refuse(const std::vector<Intent>& heads, std::size_t first, std::size_t other) const;
  static void agree_on_broken(const std::vector<Intent>& heads);
  std::string describe(const Intent& intent) const;
  static std::string describe_version(std::int64_t version);

  const std::shared_ptr<Backend> backend_;
  std::shared_ptr<Collectives> collectives_;
  const std::vector<std::string> names_;
  const int rank_;
  const int size_;
  const Shards shards_;
  std::exception_ptr failure_;    // the first; lane thread only
  std::set<std::int64_t> taken_;  // units; lane thread only
  bool was_uneven_ = false;       // lane thread only
  HostLane thread_;               // last: it is gone before what it uses
};

}  // namespace noria
