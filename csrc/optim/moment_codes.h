// Moments of 8 bits as floats, and floats as such moments; see optim/update.h, Note [State formats].
//
// Decoding and encoding again gives the same codes and scales, of all that an update writes: state that is saved as
// plain floats comes back to the bit. Encoding rounds to nearest, and as an update does otherwise.
//
// Units: elements, from a parameter's beginning; a scale for each kStateBlock of them. Ownership: none; arrays are the
// caller's and do not overlap. Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>

namespace noria {

/// `is_first`: of a first moment, which has a sign.
void encode_moment(const float* values, std::uint8_t* codes, float* scales, std::size_t count, bool is_first);
void decode_moment(const std::uint8_t* codes, const float* scales, float* values, std::size_t count, bool is_first);

/// The bits that roundings take from a number, as the kernels derive them; 0 stays 0.
std::uint32_t random_bits_of(std::uint32_t number);

}  // namespace noria
