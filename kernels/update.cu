// Defines the kernels that update weights and add up squares of gradients on a GPU, from the formulas in csrc/optim.
//
// The file is compiled twice. One build flushes denormals (NORIA_FLUSHES is 1: AdamW, Adam, SGD). The other keeps them
// (0: Lion, sums). See csrc/optim/update.h, Note [Denormals]. Apart from that all operations follow IEEE
// 754: no contraction, exact division and square root. Scaling a gradient before the rule always keeps denormals. So
// these products and quotients are written in PTX.
//
// Tests compile it for the host, with NORIA_FLUSHES = 2, which has all kernels, and kernels/host_threads.h.
//
// Units: counts are in elements.
#include <cstddef>
#include <cstdint>

#include "optim/update_kernels.h"

#if defined(__CUDACC__)
#define NORIA_EACH __device__ __attribute__((always_inline))
#define NORIA_KERNEL(name) extern "C" __global__ void __launch_bounds__(256) name
#define NORIA_THREAD (std::size_t{blockIdx.x} * blockDim.x + threadIdx.x)
#define NORIA_THREADS (std::size_t{gridDim.x} * blockDim.x)
#define __builtin_fmaf __fmaf_rn
#define __builtin_sqrtf __fsqrt_rn
#define __builtin_fabsf fabsf
#define __builtin_inff() __int_as_float(0x7f800000)
#else
#include "kernels/host_threads.h"
#endif

#define NORIA_INDEPENDENT

namespace noria {
namespace {

#include "optim/state_formats.inc"

#include "optim/master_formats.inc"

#include "optim/update_rules.inc"

#if defined(__CUDACC__)
NORIA_EACH inline float times(float value, float factor) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(value), "f"(factor));
  return product;
}
NORIA_EACH inline float over(float value, float divisor) {
  float quotient;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(value), "f"(divisor));
  return quotient;
}
#endif

// Returns the gradient after divisor and factors; see csrc/optim/update.h, Note [Factor].
template <class Master>
NORIA_EACH inline float seen(typename Master::Gradient gradient, const UpdateScalars& s) {
  if (s.divisor != 1.0f) gradient = Master::made_of(over(Master::value(gradient), s.divisor));
  if (s.prefactor != 1.0f) gradient = Master::made_of(times(Master::value(gradient), s.prefactor));
  if (s.factor != 1.0f) gradient = Master::made_of(times(Master::value(gradient), s.factor));
  return Master::value(gradient);
}

// A GPU's own NaN has all bits set: its high half, rounded, would be zero. A NaN of a moment may become that of p.
NORIA_EACH inline float stored(float value) { return value != value ? as_float(0x7fc00000u) : value; }

template <class Rule, class Master>
NORIA_EACH inline void update_one(const UnitArrays& arrays, const void* gradients, std::size_t i,
                                  const UpdateScalars& s) {
  const float g = seen<Master>(static_cast<const typename Master::Gradient*>(gradients)[i], s);
  float p = Master::load(arrays, i), m = 0.0f, v = 0.0f;
  if constexpr (Rule::kMoments > 0) m = arrays.m.fp32[i];
  if constexpr (Rule::kMoments > 1) v = arrays.v.fp32[i];
  Rule::update(p, m, v, g, s);
  if constexpr (Rule::kMoments > 0) arrays.m.fp32[i] = stored(m);
  if constexpr (Rule::kMoments > 1) arrays.v.fp32[i] = stored(v);
  Master::store(arrays, i, stored(p));
}

// As UpdateKernels::Sum, for one of the sums of one chunk.
template <class Master>
NORIA_EACH inline double sum_of(const void* gradients, std::size_t begin, std::size_t end) {
  const auto* from = static_cast<const typename Master::Gradient*>(gradients);
  double sum = 0.0;
  for (std::size_t i = begin; i < end; i += kSumSpan) {
    const auto g = static_cast<double>(Master::value(from[i]));
    sum += g * g;
  }
  return sum;
}

}  // namespace

#define NORIA_UPDATE(name, Rule, Master)                                                                            \
  NORIA_KERNEL(noria_update_##name)(UnitArrays arrays, const void* gradients, std::size_t count, UpdateScalars s) { \
    for (std::size_t i = NORIA_THREAD; i < count; i += NORIA_THREADS) {                                             \
      update_one<Rule, Master>(arrays, gradients, i, s);                                                            \
    }                                                                                                               \
  }
#define NORIA_UPDATES(name, Rule)         \
  NORIA_UPDATE(name##_whole, Rule, Whole) \
  NORIA_UPDATE(name##_split, Rule, Split)

// `sums`: kSumSpan for each chunk of `chunk` elements.
#define NORIA_SUM(name, Master)                                                                                 \
  NORIA_KERNEL(noria_sum_##name)(const void* gradients, std::size_t count, std::size_t chunk, double* sums) {   \
    const std::size_t num_sums = (count + chunk - 1) / chunk * kSumSpan;                                        \
    for (std::size_t i = NORIA_THREAD; i < num_sums; i += NORIA_THREADS) {                                      \
      const std::size_t begin = i / kSumSpan * chunk;                                                           \
      sums[i] = sum_of<Master>(gradients, begin + i % kSumSpan, begin + chunk < count ? begin + chunk : count); \
    }                                                                                                           \
  }

#if NORIA_FLUSHES != 0
NORIA_UPDATES(adamw, AdamW)
NORIA_UPDATES(adam, Adam)
NORIA_UPDATES(sgd, Sgd)
NORIA_UPDATES(sgd_momentum, SgdMomentum)
#endif
#if NORIA_FLUSHES != 1
NORIA_UPDATES(lion, Lion)
NORIA_SUM(whole, Whole)
NORIA_SUM(split, Split)

// Adds the sums of each chunk, in order: the first of them becomes their sum.
NORIA_KERNEL(noria_add_sums)(double* sums, std::size_t num_chunks) {
  for (std::size_t i = NORIA_THREAD; i < num_chunks; i += NORIA_THREADS) {
    double sum = 0.0;
    for (std::size_t lane = 0; lane < kSumSpan; ++lane) sum += sums[kSumSpan * i + lane];
    sums[kSumSpan * i] = sum;
  }
}
#endif

}  // namespace noria
