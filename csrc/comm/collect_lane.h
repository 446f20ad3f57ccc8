// The collect lane: what all ranks do together, in the order of submission, on a thread of its own.
//
// Ownership: owns its thread, shares the backend, whose tickets it takes and gives, and the collectives. Order: first
// in, first out, so that ranks which submit the same ops in the same order meet in each. Threads: every member from any
// thread; never takes the GIL. The lane's own thread is the only one that calls the collectives.
//
// Note [Agreement]. Before each op the ranks tell each other which one it is. Ranks that do not do the same (a branch
// that only some take) would else wait for ever, or put one unit's bytes into another; so all of them raise, with the
// first difference. After a failure nothing is asked of the others any more: what is queued fails with the same error.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "device/host_lane.h"

namespace noria {

/// Gathers, then a reduction if `all` of it is not null.
struct Collective {
  std::vector<Gather> gathers;
  Reduction reduction;

  /// What a rank gets from the others at least; as much it sends.
  Bytes received(const Shards& shards) const {
    Bytes bytes = reduction.received(shards);
    for (const Gather& each : gathers) bytes += each.received(shards);
    return bytes;
  }
};

class CollectLane {
 public:
  /// `names`: of units, for messages.
  CollectLane(std::shared_ptr<Backend> backend, std::shared_ptr<Collectives> collectives,
              std::vector<std::string> names);

  int rank() const { return rank_; }
  int size() const { return size_; }
  Shards shards() const { return shards_; }

  /// Queues `collective` after `waits`. Does not synchronize.
  Ticket submit(const OpLabel& label, Collective collective, std::vector<Ticket> waits);
  /// Everybody's numbers, by rank, behind each other. Blocks until all that was submitted before is done.
  std::vector<std::int64_t> exchange(std::vector<std::int64_t> numbers);

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
    Act act;
    std::int64_t subject;  // the unit, or how many numbers
    bool operator==(const Intent&) const = default;
  };
  using Failed = std::function<void(std::exception_ptr)>;

  /// Queues `act`; `failed` hears of it if it throws, if the lane has failed before, or if it is closed.
  void enqueue(std::function<void()> act, const Failed& failed);
  void agree(const Intent& own);
  std::string describe(const Intent& intent) const;

  const std::shared_ptr<Backend> backend_;
  std::shared_ptr<Collectives> collectives_;
  const std::vector<std::string> names_;
  const int rank_;
  const int size_;
  const Shards shards_;
  std::exception_ptr failure_;  // the first; lane thread only
  HostLane thread_;             // last: it is gone before what it uses
};

}  // namespace noria
