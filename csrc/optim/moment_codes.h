// Converts moments of 8 bits to floats and back; see optim/update.h, Note [State formats].
//
// If moments that an update has written are decoded and encoded again, codes and scales are the same. So state that is
// saved as plain floats comes back to the bit. Encoding rounds to nearest; otherwise it works as in an update.
//
// Units: elements, from a parameter's beginning; one scale for each kStateBlock of them.
// Ownership: none; the caller owns the arrays, which do not overlap.
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/update_kernels.h"

namespace noria {

/// `is_first`: it is a first moment, which has a sign.
void encode_moment(const float* values, std::uint8_t* codes, float* scales, std::size_t count, bool is_first);
void decode_moment(const std::uint8_t* codes, const float* scales, float* values, std::size_t count, bool is_first);

/// Returns the number that the random bits of this element, and of those behind it, are made of. `element`: its own
/// number; see UpdatePiece.
Rounding first_random(std::uint32_t key, std::uint64_t element);

}  // namespace noria
