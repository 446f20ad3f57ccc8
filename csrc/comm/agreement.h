// Agreement lets ranks tell each other what they are about to do together, and refuses what does not go together.
//
// Example: rank 0 is about to gather "blocks.3" and rank 1 to gather "blocks.4". Both throw the same UsageError.
// Ownership: shares the collectives. Order: all ranks call `tell` equally often, and make the same calls of
// `Collectives::exchange` between. Threads: one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/collectives.h"

namespace noria {

/// Describes what a rank is about to do.
struct Intent {
  enum class Act : std::uint8_t { gather, reduce, exchange };
  Act act = Act::exchange;
  Phase phase = Phase::forward;
  std::int64_t subject = 0;     // the unit, or how many numbers
  std::int64_t version = 0;     // of the unit, or which SyncPoint
  std::int64_t num_broken = 0;  // how many backwards that reduce gradients have raised on this rank
  bool is_same_op(const Intent& other) const { return act == other.act && subject == other.subject; }
};

/// Says where ranks exchange numbers: at the end of a backward, or before the calling threads do something together (a
/// norm, `state_dict()`). In the latter case the numbers say what that is.
enum class SyncPoint : std::uint8_t { backward, other };

class Agreement {
 public:
  /// `most`: how many intents a rank can tell at once. `names`: of the units, for messages. `remedy`: for errors.
  Agreement(std::shared_ptr<Collectives> collectives, std::size_t most, std::vector<std::string> names,
            std::string remedy);

  /// Tells the other ranks what this one is about to do: 1 to `most` intents, in their order. Each entry of the result
  /// has one intent of each rank: first what all do first, then what all do second. It ends where one rank told no
  /// more.
  std::vector<std::vector<Intent>> tell(const std::vector<Intent>& own);

  /// Throws UsageError if a backward has raised on some ranks alone. What the other ranks reduced in it is of another
  /// batch than what comes next on the ranks where it raised.
  static void refuse_other_broken(const std::vector<Intent>& all);
  /// Throws UsageError unless all ranks are about to do the same op, at the same version.
  void refuse_other_ops(const std::vector<Intent>& all) const;
  /// Throws UsageError: ranks `first` and `other` are about to do ops that do not go together.
  [[noreturn]] void refuse(const std::vector<Intent>& all, std::size_t first, std::size_t other) const;
  /// Throws UsageError: rank `first` is about to do an op on a unit that rank `other` has at this version.
  [[noreturn]] void refuse_version(const std::vector<Intent>& all, std::size_t first, std::size_t other,
                                   std::int64_t version) const;

 private:
  std::string describe(const Intent& intent) const;

  const std::shared_ptr<Collectives> collectives_;
  const std::size_t most_;
  const std::vector<std::string> names_;
  const std::string remedy_;
};

}  // namespace noria
