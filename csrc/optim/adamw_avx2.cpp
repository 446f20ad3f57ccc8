// The AdamW loop for AVX2 and FMA; an empty table where the build does not target it.
#include "optim/adamw_kernels.h"

namespace noria {

#if defined(__AVX2__) && defined(__FMA__)

#include "optim/adamw_kernels.inc"

const AdamWKernels kAdamWAvx2{update_fp32, update_split};

#else

const AdamWKernels kAdamWAvx2{};

#endif

}  // namespace noria
