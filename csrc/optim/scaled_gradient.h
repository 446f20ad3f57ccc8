// Multiplies a stretch of a gradient as the rule sees it: see optim/update.h, Note [Factor].
//
// Units: elements.
// Threads: one for each object.
#pragma once

#include <array>
#include <cstddef>

#include "optim/update_kernels.h"

namespace noria {

class ScaledGradient {
 public:
  /// The most elements of one call. They stay in the first cache until the rule has read them.
  static constexpr std::size_t kMost = 2048;

  // Not initialised: each element is written before it is read.
  ScaledGradient() {}  // NOLINT(cppcoreguidelines-pro-type-member-init,modernize-use-equals-default)

  static bool has_work(const UpdateScalars& scalars) {
    return scalars.divisor != 1.0f || scalars.prefactor != 1.0f || scalars.factor != 1.0f;
  }
  /// Returns the gradient that the rule sees: `gradient` itself, or memory of this object until the next call.
  const void* seen(const UpdateKernels& kernels, MasterFormat format, const void* gradient, std::size_t count,
                   const UpdateScalars& scalars) {
    const auto change = [&](UpdateKernels::Scale by, float factor) {
      if (factor == 1.0f) return;
      by(gradient, of_.data(), count, factor);
      gradient = of_.data();
    };
    change(kernels.divide[static_cast<int>(format)], scalars.divisor);
    change(kernels.scale[static_cast<int>(format)], scalars.prefactor);
    change(kernels.scale[static_cast<int>(format)], scalars.factor);
    return gradient;
  }

 private:
  alignas(64) std::array<float, kMost> of_;
};

}  // namespace noria
