// Computes a digest: a number for a range of gradient bytes. A draft notes the digest of what it has read. A later job
// compares it with what is there now.
//
// It is two runs of NH over blocks of 8 KiB, mixed with the place of the block. NH is a sum of products of 32-bit
// halves, each half with its own key (UMAC, Black and others, 1999). The keys are drawn once per process. Two ranges of
// one size and different bytes have the same digest with a chance of about 2^-64. The digests of the pieces of a range,
// summed in any order, give the digest of the range.
//
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>

namespace noria {

/// `place`: where the range begins in the whole, in bytes. Cut a range only at multiples of 8 KiB from its beginning:
/// blocks are counted from there.
std::uint64_t digest(const void* data, std::size_t num_bytes, std::uint64_t place);

}  // namespace noria
