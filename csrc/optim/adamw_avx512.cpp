// The AdamW loop for AVX-512 (x86-64-v4); an empty table where the build does not target it.
#include "optim/adamw_kernels.h"

namespace noria {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include "optim/adamw_kernels.inc"

const AdamWKernels kAdamWAvx512{update_fp32, update_split};

#else

const AdamWKernels kAdamWAvx512{};

#endif

}  // namespace noria
