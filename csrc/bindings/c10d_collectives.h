// Makes Collectives that use torch's process groups: NCCL on CUDA, gloo on the host.
//
// Ownership: shares the groups with their makers, so that no group is destroyed while an op runs.
// Order: as collectives.h says; on CUDA on a stream of its own.
//
// Note [Sums]. The factor 1 / size is multiplied in before the sum, as DistributedDataParallel does it. The groups
// choose the order of the sum; over two ranks there is only one. Shards are reduced inside the replica first, then
// across replicas, so that the links between replicas carry one shard.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/collectives.h"

namespace noria {

/// Takes the groups by the names under which torch has registered them. `shards` has the ranks of this rank's replica,
/// `across` the ranks with the same shard. Both move device memory, and are empty if this rank would be alone.
/// `numbers` has all ranks, and moves host memory. `replica`: the ranks of `shards`, as `numbers` counts them.
std::shared_ptr<Collectives> make_c10d_collectives(const std::string& shards, const std::string& across,
                                                   const std::string& numbers, std::vector<int> replica,
                                                   c10::Device device);

}  // namespace noria
