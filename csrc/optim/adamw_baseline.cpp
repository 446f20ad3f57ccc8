// The AdamW loop for the instruction set that every machine of this architecture has.
#include "optim/adamw_kernels.h"

namespace noria {

#include "optim/adamw_kernels.inc"

const AdamWKernels kAdamWBaseline{update_fp32, update_split};

}  // namespace noria
