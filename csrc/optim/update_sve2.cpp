// Compiles the loops for SVE2, of any width. The table is empty if the build does not target it.
#include "optim/prefetch.h"
#include "optim/update_kernels.h"

namespace noria {

#if defined(__ARM_FEATURE_SVE2)

#include "optim/update_kernels.inc"

const UpdateKernels kSve2Kernels = kKernels;

#else

const UpdateKernels kSve2Kernels{};

#endif

}  // namespace noria
