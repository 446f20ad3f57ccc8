// Splits an fp32 master into its bf16 working copy and 16 more bits, and joins them again.
//
// If u is the master's bits: hi = (u + 0x8000) >> 16, lo = u & 0xffff; u = (hi << 16) + signext(lo). This rounds to
// nearest, ties away from zero. It is lossless in 32 bits, which ties-to-even cannot be.
//
// A NaN master stays a NaN, but its high half need not be one. 0x7f800001 to 0x7f807fff read as infinity, and
// 0x7fff8000 and above carry into the sign. The NaNs that arithmetic makes (0x7fc00000) are not among them. Code that
// loads masters or moments from outside must look for the others (`plain_nans` in python/noria/runtime/masters.py).
//
// Units: elements.
// Ownership: none; the caller owns the arrays, which do not overlap.
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>

namespace noria {

/// If `low` is null, writes only the high halves, rounded.
void split_master(const float* master, std::uint16_t* high, std::uint16_t* low, std::size_t count);
void join_master(const std::uint16_t* high, const std::uint16_t* low, float* master, std::size_t count);

}  // namespace noria
