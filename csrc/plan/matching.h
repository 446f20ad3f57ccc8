// Which pipeline stages lend which memory to which: the same on every rank that is given the same offers.
//
// A pure function. Units: bytes; bandwidth in any one unit, 0 where there is no link. Ranks are indices into the
// offers.
//
// Note [Matching]. What a stage lacks goes over the slow link to its host, and all stages wait for the slowest. So
// where less is spare than is needed, what remains lacking is made as even as it can be. A borrower's loans are in
// proportion to its links, since it uses them all at once, as far as the lenders' room goes.
#pragma once

#include <string>
#include <vector>

#include "base/bytes.h"

namespace noria {

struct MemoryOffer {
  std::string machine;  // processes of one machine alone can lend each other
  Bytes needed;         // more than the stage has, when it has most
  Bytes spare;          // that it will not need itself; of a stage that needs more, nothing is asked
};

struct MemoryLoan {
  int lender = 0, borrower = 0;
  Bytes offset, bytes;  // of the lender's arena; multiples of kLoanGranule
  auto operator<=>(const MemoryLoan&) const = default;
};

inline constexpr Bytes kLoanGranule{std::int64_t{64} << 10};

/// `bandwidth`: by lender, then by borrower. At most one loan for each pair; sorted; a lender's lie one behind the
/// other from its arena's beginning, and do not exceed its spare memory.
std::vector<MemoryLoan> match(const std::vector<MemoryOffer>& offers,
                              const std::vector<std::vector<double>>& bandwidth);

}  // namespace noria
