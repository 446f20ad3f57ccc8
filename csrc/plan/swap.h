// Where what blocks save goes when it has no room: to peers, to the host, or nowhere, since it is computed again.
//
// A pure function. Units: microseconds, bytes, of one step. Times are as measured without stalls.
//
// Note [Swap or recompute]. A block whose activations are swapped costs nothing while the copies hide behind compute:
// there and back must fit the gap between its forward and its backward, and all copies of a lane the time that the
// lane has: it goes out behind forwards, which wait for room, and comes back behind backwards. What does not hide is a
// stall; computing again is never hidden. So blocks are computed again, the cheapest for each byte first, as long as
// that costs less than the stalls which it ends.
//
// Note [Peers or host]. Peers' room is for whom it helps most: for blocks that the host's slower link would hold up, by
// the stall that each byte there spares. What hides behind compute on the host's link anyway may go there. Where peers
// have room for a part of what is sent to them, each block has its part of that.
//
// Who stays is no matter of this: the bundles whose backward comes first (Note [Bundles] in engine/saver.h).
#pragma once

#include <cstdint>
#include <vector>

#include "base/bytes.h"

namespace noria {

struct SavedBlock {
  Bytes bytes;            // that a visit saves
  Bytes inputs;           // that it keeps where it is computed again
  int num_visits = 0;     // of a step
  double forward_us = 0;  // of a visit
  double gap_us = 0;      // from the end of its forward to its backward
};

/// The way to the host: out on one lane, back on another.
struct HostLink {
  double out_us_per_byte = 0, back_us_per_byte = 0;
  // Of a step, behind forwards and behind backwards, and not needed for weights and gradients.
  double out_free_us = 0, back_free_us = 0;
};

/// The way to peers: both ways on one lane.
struct PeerLink {
  Bytes bytes;             // that their room takes, of a step; none: no peers
  double us_per_byte = 0;  // one way
  double free_us = 0;
};

struct Swaps {
  Bytes bytes;  // that leave in a step, and come back
  HostLink host;
  PeerLink peers;
};

enum class Way : std::uint8_t { peers, host, recompute };  // peers: as far as their room goes

/// By block.
std::vector<Way> choose_ways(const std::vector<SavedBlock>& blocks, const Swaps& swaps);

/// What the step pays for this choice: computing again, and stalls.
double cost_us(const std::vector<SavedBlock>& blocks, const Swaps& swaps, const std::vector<Way>& ways);

}  // namespace noria
