// Collectives by torch's process groups: NCCL's on CUDA, gloo's on the host.
//
// Ownership: shares the groups with whoever made them, so that none goes while an op runs. Order: as collectives.h
// says; on CUDA on a stream of its own. Note [Sums]: the factor 1 / size is multiplied in before the sum, as
// DistributedDataParallel does it, and the order of the sum is the groups': over two ranks there is only one. Shards
// are summed inside the replica before they are across replicas, so that the links between these carry one shard.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/collectives.h"

namespace noria {

/// Groups by the names under which torch has registered them. `shards`, of this rank's replica, and `across`, of those
/// with the same shard, move device memory, and are empty where this rank would be alone; `numbers`, of all, moves host
/// memory. `replica`: the ranks of `shards`, as `numbers` counts them.
std::shared_ptr<Collectives> make_c10d_collectives(const std::string& shards, const std::string& across,
                                                   const std::string& numbers, std::vector<int> replica,
                                                   c10::Device device);

}  // namespace noria
