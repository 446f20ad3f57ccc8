// Compiles the loops for AVX-512 (x86-64-v4). The table is empty if the build does not target it.
#include "optim/prefetch.h"
#include "optim/update_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace noria {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include "optim/update_kernels.inc"

const UpdateKernels kAvx512Kernels = kKernels;

#else

const UpdateKernels kAvx512Kernels{};

#endif

}  // namespace noria
