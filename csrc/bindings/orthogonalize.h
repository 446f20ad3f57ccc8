// Muon's matrix products, by torch: Newton and Schulz's iteration, as torch.optim.Muon does it.
//
// Units: elements.
// Ownership: none; torch takes memory for the products, up to 6 bytes for each element, and gives it back.
// Order: none.
// Threads: any, without the GIL. At its first call a thread takes over torch's number of threads, and keeps it.
//   Products have the bits of torch.optim.Muon with that number.
#pragma once

#include "optim/update.h"

namespace noria {

/// See `UpdateJob::orthogonalize`.
void orthogonalize_by_torch(const MatrixToOrthogonalize& matrix);

}  // namespace noria
