// Muon's matrix products, by torch: Newton and Schulz's iteration, as torch.optim.Muon does it.
//
// Units: elements.
// Ownership: none; torch takes memory for the products, up to 6 bytes for each element, and gives it back.
// Order: none.
// Threads: any, without the GIL. Products run on as many threads as torch had when the calling thread first did this.
//   They have the bits that torch.optim.Muon has with so many threads.
#pragma once

#include "optim/update.h"

namespace noria {

/// See `UpdateJob::orthogonalize`.
void orthogonalize_by_torch(const MatrixToOrthogonalize& matrix);

}  // namespace noria
