// Decides where the saved activations of each block go if they do not fit: to peers, to the host, or nowhere. In the
// last case they are recomputed.
//
// A pure function. Units: microseconds, bytes, of one step. Times are as measured without stalls.
//
// Note [Swap or recompute]. A block whose activations are swapped costs nothing while its copies hide behind compute.
// For that, the copies out and back must fit in the gap between the block's forward and its backward. All copies of a
// lane must also fit in the time that the lane has. Copies out hide behind forwards, which wait for room; copies back
// hide behind backwards. A copy that does not hide is a stall; recomputation never hides. So blocks are recomputed, the
// cheapest per byte first, as long as that costs less than the stalls it removes.
//
// Note [Peers or host]. The memory of peers goes to the blocks that it helps most. These are the blocks that the host's
// slower link would stall, in the order of the stall that each byte at peers saves. Blocks whose copies hide behind
// compute on the host's link may go to the host. If peers have room for only a part of what is sent to them, each of
// these blocks gets the same fraction.
//
// Another rule decides which blocks stay on the device: Note [Bundles] in engine/activation_store.h.
#pragma once

#include <cstdint>
#include <vector>

#include "base/bytes.h"

namespace noria {

struct SavedBlock {
  Bytes bytes;            // saved by one visit
  Bytes inputs;           // kept by one visit if the block is recomputed
  int num_visits = 0;     // per step
  double forward_us = 0;  // of one visit
  double gap_us = 0;      // from the end of its forward to its backward
};

/// The link to the host: out on one lane, back on another.
struct HostLink {
  double out_us_per_byte = 0, back_us_per_byte = 0;
  // Per step, behind forwards and behind backwards: the time that weights and gradients do not need.
  double out_free_us = 0, back_free_us = 0;
};

/// The link to peers: both directions on one lane.
struct PeerLink {
  Bytes bytes;             // what peers can take per step; 0: no peers
  double us_per_byte = 0;  // one way
  double free_us = 0;
};

struct Swaps {
  Bytes bytes;  // what leaves the device and comes back, per step
  HostLink host;
  PeerLink peers;
};

enum class Way : std::uint8_t { peers, host, recompute };  // peers: what does not fit there goes to the host

/// Returns the way of each block.
std::vector<Way> choose_ways(const std::vector<SavedBlock>& blocks, const Swaps& swaps);

/// Returns what the step pays for this choice: recomputation and stalls.
double cost_us(const std::vector<SavedBlock>& blocks, const Swaps& swaps, const std::vector<Way>& ways);

}  // namespace noria
