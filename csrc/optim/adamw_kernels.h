// What the translation units per instruction set share with their driver: scalars, and a table of entries.
//
// Kept apart from optim/adamw.h, and free of the standard library, because these files are compiled for instruction
// sets that the running machine may lack: an inline function that leaked out of them could be the copy that the linker
// keeps for everybody.
#pragma once

#include <cstddef>
#include <cstdint>

namespace noria {

/// The hyperparameters as the element formula wants them, each rounded once from double; made by `adamw_scalars`.
struct AdamWScalars {
  float gradient_sign;  // -1 to maximize
  float decay;          // -lr * weight_decay: rounding 1 - lr * weight_decay instead would bias every step
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float negative_step;       // -lr / (1 - beta1^step)
  float inverse_bias2_root;  // 1 / sqrt(1 - beta2^step)
  float eps;
};

/// One instruction set's entries; null where this build has none.
struct AdamWKernels {
  void (*fp32)(float* master, float* m, float* v, const float* gradient, std::size_t count,
               const AdamWScalars& scalars) = nullptr;
  void (*split)(std::uint16_t* high, std::uint16_t* low, float* m, float* v, const std::uint16_t* gradient,
                std::size_t count, const AdamWScalars& scalars) = nullptr;
};

extern const AdamWKernels kAdamWBaseline;
extern const AdamWKernels kAdamWAvx2;
extern const AdamWKernels kAdamWAvx512;

}  // namespace noria
