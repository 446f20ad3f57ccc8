// Chooses the units that are stashed at peers, so that later fetches use the link to a peer and not the host's link.
//
// A pure function. Units: microseconds, bytes, of one step.
//
// Note [Home or peer]. Example: a unit is fetched n times at one version. The first fetch comes from home, then the
// unit is stashed at a peer, and the other n - 1 fetches come from there. The fetch lane and the peer lane work at the
// same time, so the lane that is busy longer decides. Units with the most fetches are taken first. A unit is stashed
// only if this makes the busier lane less busy. If the peer's link is much faster, all units are stashed; if both links
// are equally fast, about half. A slower peer's link is not used, because a unit that compute waits for would come
// later than from home.
#pragma once

#include <cstddef>
#include <vector>

#include "base/bytes.h"

namespace noria {

struct FetchedUnit {
  Bytes bytes;
  int num_fetches = 0;  // per step, at one version, from home or from a peer
};

struct FetchLinks {
  double home_us_per_byte = 0, peer_us_per_byte = 0;
  double home_us = 0, peer_us = 0;  // per step: the other work of these lanes
};

/// Returns the indices of the units to stash, in rising order. Together they fit in `room`, the memory at peers.
std::vector<std::size_t> choose_copies(const std::vector<FetchedUnit>& units, const FetchLinks& links, Bytes room);

}  // namespace noria
