// Which blocks compute their activations again, where swapping all that has no room would stall.
//
// A pure function. Units: microseconds, bytes, of one step. Times are as measured without stalls.
//
// Note [Swap or recompute]. A block whose activations are swapped costs nothing while the copies hide behind compute:
// there and back must fit the gap between its forward and its backward, and all copies of a lane the time that the
// lane has. What does not hide is a stall; computing again is never hidden. So blocks are computed again, the cheapest
// for each byte first, as long as that costs less than the stalls which it ends.
#pragma once

#include <cstddef>
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
struct SwapLink {
  Bytes bytes;  // that go to the host in a step, and come back
  double out_us_per_byte = 0, back_us_per_byte = 0;
  double out_free_us = 0, back_free_us = 0;  // of a step, behind compute, and not needed for weights and gradients
};

/// Indices of the blocks to be computed again; rising.
std::vector<std::size_t> choose_recomputed(const std::vector<SavedBlock>& blocks, const SwapLink& link);

/// What the step pays for this choice: computing again, and stalls.
double cost_us(const std::vector<SavedBlock>& blocks, const SwapLink& link, const std::vector<std::size_t>& recomputed);

}  // namespace noria
