// AdamW, once, for one element; and the driver that picks the widest instruction set.
//
// Source: Loshchilov and Hutter 2019, algorithm 2, as torch.optim.AdamW reads it: p decays by lr * weight_decay and
// moves by lr times the corrected moments. Decay and move are summed first and p is rounded once, where torch rounds
// twice. Bias corrections are folded into scalars that are computed in double on the launching thread.
//
// Units: elements. Ownership: none; arrays are the caller's and do not overlap. Threads: any; the functions keep no
// state, and one array may be updated in disjoint pieces at once, with the same bits however it is cut.
//
// Note [Same bits everywhere]. The formula is plain C++ with every fused multiply-add written out, compiled with
// -ffp-contract=off once per instruction set from adamw_kernels.inc; auto-vectorised code of any width then gives the
// same bits. Denormal moments and products are flushed by control register (FTZ and DAZ) inside the kernels' driver,
// never outside of it: the moments of a parameter without gradient decay into denormals, which cost up to ten times
// the time on some processors. The price: squares of gradients below 3e-18 are lost from v, which shows only where eps
// is below 1e-15 (with eps = 0 such an element divides by zero, as a zero gradient does in torch).
//
// Note [Split master]. hi = (u + 0x8000) >> 16, lo = u & 0xffff; u = (hi << 16) + signext(lo). Round to nearest, ties
// away from zero: lossless in 32 bits, which ties-to-even cannot be. A NaN master stays a NaN, but its high half need
// not be one: payloads 0x7f80xxxx read as infinity and 0x7fff8000 and above carry into the sign. The NaNs that
// arithmetic makes (0x7fc00000) are not among them; whoever loads masters from outside must look for the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "optim/adamw_kernels.h"

namespace noria {

struct AdamWHyper {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 1e-2;
  bool maximize = false;
};

/// `step` counts from 1; UsageError below.
AdamWScalars adamw_scalars(const AdamWHyper& hyper, std::int64_t step);

/// Instruction sets that this build has and this machine can run, widest last: "baseline", "avx2", "avx512".
std::vector<std::string> adamw_instruction_sets();

/// In place on `count` elements. `instruction_set` empty: the widest. UsageError for one that is not listed above.
void adamw_fp32(float* master, float* m, float* v, const float* gradient, std::size_t count,
                const AdamWScalars& scalars, const std::string& instruction_set = "");
void adamw_split(std::uint16_t* high, std::uint16_t* low, float* m, float* v, const std::uint16_t* gradient,
                 std::size_t count, const AdamWScalars& scalars, const std::string& instruction_set = "");

/// The split encoding by itself, for loading and saving masters.
/// `low` null: the high halves alone, rounded.
void split_master(const float* master, std::uint16_t* high, std::uint16_t* low, std::size_t count);
void join_master(const std::uint16_t* high, const std::uint16_t* low, float* master, std::size_t count);

}  // namespace noria
