// A number for a range of gradient bytes, by which a draft is known to have read what is there now.
//
// Two runs of NH (Black et al. 1999, UMAC: sums of products of 32-bit halves, each with a key of its own) over blocks
// of 8 KiB, mixed with the place of the block; keys are drawn once per process. Different bytes give the same number
// with a chance of about 2^-64, whatever they are. Sums of digests of disjoint ranges are the digest of the whole, in
// any order.
//
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>

namespace noria {

/// `place`: where the range begins in the whole, in bytes; a multiple of 8 KiB, unless the range is whole by itself.
std::uint64_t digest(const void* data, std::size_t num_bytes, std::uint64_t place);

}  // namespace noria
