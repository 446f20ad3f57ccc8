// Compiles the loops for the instruction set that every machine of this architecture has.
#include "optim/prefetch.h"
#include "optim/update_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace noria {

#include "optim/update_kernels.inc"

const UpdateKernels kBaselineKernels = kKernels;

}  // namespace noria
