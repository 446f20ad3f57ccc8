// Computes a digest: a number for a range of gradient bytes. A draft notes the digest of what it has read. A later job
// compares it with what is there now.
//
// It is two runs of NH (Black et al. 1999, UMAC: sums of products of 32-bit halves, each half with its own key) over
// blocks of 8 KiB, mixed with the place of the block. The keys are drawn once per process. Any two different byte
// ranges have the same digest with a chance of about 2^-64. The digests of disjoint ranges, summed in any order, give
// the digest of the whole.
//
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>

namespace noria {

/// `place`: where the range begins in the whole, in bytes. It is a multiple of 8 KiB, unless the range is the whole
/// itself.
std::uint64_t digest(const void* data, std::size_t num_bytes, std::uint64_t place);

}  // namespace noria
