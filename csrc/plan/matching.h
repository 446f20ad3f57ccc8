// Decides which pipeline stages lend memory to which. The result is the same on every rank that gets the same offers.
//
// A pure function. Units: bytes; bandwidth in any one unit, 0 if there is no link. Ranks are indices into the offers.
//
// Note [Matching]. Memory that a stage lacks is replaced by transfers over the slow link to its host, and all stages
// wait for the slowest stage. So if less memory is spare than needed, the remaining lack is made as even as possible. A
// borrower uses all its links at once. So its loans are in proportion to the bandwidth of its links, limited by what
// the lenders have. Spare memory that no link connects to a stage in need is not counted for this. Wanted memory is
// lent after all needs. If the stages want more than is left, each gets the same fraction of its wish: half of the
// units bring half of the gain.
//
// Note [Classes of links]. No link measures the same twice, but the loans must be the same from run to run. Links are
// of few kinds: one or two side by side, full or half width, NVLink or the bus. So each bandwidth is divided by that of
// the borrower's fastest link and rounded to the nearest power of two. Only links of the same borrower are compared,
// because a borrower divides what it wants among its own links alone. A link falls into the wrong class only if the
// measured ratio is wrong by a factor of 1.41.
#pragma once

#include <string>
#include <vector>

#include "base/bytes.h"

namespace noria {

struct MemoryOffer {
  std::string machine;  // only processes of one machine can lend to each other
  Bytes needed;         // what the stage lacks at its peak
  Bytes spare;          // what the stage will not need itself; ignored if `needed` is not 0
  Bytes wanted = {};    // useful for copies of units; lent from what is spare after all needs are met
};

struct MemoryLoan {
  int lender = 0, borrower = 0;
  Bytes offset, bytes;  // of the lender's arena; multiples of kLoanGranule
  Bytes wanted = {};    // the part of `bytes`, at its end, that was wanted and not needed
  auto operator<=>(const MemoryLoan&) const = default;
};

inline constexpr Bytes kLoanGranule{std::int64_t{64} << 10};

/// Returns the loans, sorted, at most one for each pair. `bandwidth` is indexed by lender, then by borrower. The loans
/// of a lender lie one behind the other from the beginning of its arena, and do not exceed its spare memory.
std::vector<MemoryLoan> match(const std::vector<MemoryOffer>& offers,
                              const std::vector<std::vector<double>>& bandwidth);

/// Returns measured bandwidths (by lender, then by borrower) as classes: see Note [Classes of links]. A borrower's
/// fastest link is 1.
std::vector<std::vector<double>> link_classes(std::vector<std::vector<double>> bandwidth);

}  // namespace noria
