// Which pipeline stages lend which memory to which: the same on every rank that is given the same offers.
//
// A pure function. Units: bytes; bandwidth in any one unit, 0 where there is no link. Ranks are indices into the
// offers.
//
// Note [Matching]. What a stage lacks goes over the slow link to its host, and all stages wait for the slowest. So
// where less is spare than is needed, what remains lacking is made as even as it can be. A borrower's loans are in
// proportion to its links, since it uses them all at once, as far as the lenders' room goes. What can be lent to nobody
// in need, for want of a link, is left out of that. What is only wanted comes after that, and where it exceeds what is
// left, all get the same part of it: half of the units are of half the use.
//
// Note [Classes of links]. No link is measured twice alike, and who lends to whom must be the same from run to run. But
// links are of few kinds: one or two of a sort side by side, full or half as wide, NVLink or the bus. So a bandwidth is
// taken for the power of two nearest to it, as compared with the fastest of the same borrower, since a borrower divides
// what it wants among its own links alone: a link of one kind must be measured wrong by 41 % to be taken for another.
#pragma once

#include <string>
#include <vector>

#include "base/bytes.h"

namespace noria {

struct MemoryOffer {
  std::string machine;  // processes of one machine alone can lend each other
  Bytes needed;         // more than the stage has, when it has most
  Bytes spare;          // that it will not need itself; of a stage that needs more, nothing is asked
  Bytes wanted = {};    // of use to it, for copies of units: of what is spare still when all needs are met
};

struct MemoryLoan {
  int lender = 0, borrower = 0;
  Bytes offset, bytes;  // of the lender's arena; multiples of kLoanGranule
  Bytes wanted = {};    // of these, those at the end: what was not needed
  auto operator<=>(const MemoryLoan&) const = default;
};

inline constexpr Bytes kLoanGranule{std::int64_t{64} << 10};

/// `bandwidth`: by lender, then by borrower. At most one loan for each pair; sorted; a lender's lie one behind the
/// other from its arena's beginning, and do not exceed its spare memory.
std::vector<MemoryLoan> match(const std::vector<MemoryOffer>& offers,
                              const std::vector<std::vector<double>>& bandwidth);

/// Measured bandwidths by lender, then by borrower, as Note [Classes of links] says: a borrower's fastest link is 1.
std::vector<std::vector<double>> link_classes(std::vector<std::vector<double>> bandwidth);

}  // namespace noria
