// Collectives by torch's process groups: NCCL's on CUDA, gloo's on the host.
//
// Ownership: shares the groups with whoever made them, so that none goes while an op runs. Order: as collectives.h
// says; on CUDA on a stream of its own. Note [Sums]: the factor 1 / size is multiplied in before the sum, as
// DistributedDataParallel does it, and the order of the sum is the group's: over two ranks there is only one.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "comm/collectives.h"

namespace noria {

/// Groups by the names under which torch has registered them: `group` moves device memory, `numbers` host memory.
std::shared_ptr<Collectives> make_c10d_collectives(const std::string& group, const std::string& numbers,
                                                   c10::Device device);

}  // namespace noria
