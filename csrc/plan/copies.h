// Which units are kept at peers while they are evicted, so that they come back over the link to a peer and not over the
// host's.
//
// A pure function. Units: microseconds, bytes, of one step.
//
// Note [Home or peer]. A unit that is fetched n times at one version comes from home once and is put at a peer then, so
// that it comes from there n - 1 times. Both lanes carry at once what they carry, and what counts is the one that is
// busy longer. So units are kept at peers, those with the most fetches first, as long as that one gets less to do: all
// of them where the peer's link is much faster, and about half where both are as fast. A slower one is not used, for a
// unit that compute waits for would come later than from home.
#pragma once

#include <cstddef>
#include <vector>

#include "base/bytes.h"

namespace noria {

struct FetchedUnit {
  Bytes bytes;
  int num_fetches = 0;  // of a step, at one version, wherever from
};

struct FetchLinks {
  double home_us_per_byte = 0, peer_us_per_byte = 0;
  double home_us = 0, peer_us = 0;  // of a step: what else these lanes carry
};

/// Indices of the units to be kept at peers, which have `room` for them; rising.
std::vector<std::size_t> choose_copies(const std::vector<FetchedUnit>& units, const FetchLinks& links, Bytes room);

}  // namespace noria
