// Compiles the loops for AVX2 and FMA. The table is empty if the build does not target them.
#include "optim/prefetch.h"
#include "optim/update_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace noria {

#if defined(__AVX2__) && defined(__FMA__)

#include "optim/update_kernels.inc"

const UpdateKernels kAvx2Kernels = kKernels;

#else

const UpdateKernels kAvx2Kernels{};

#endif

}  // namespace noria
