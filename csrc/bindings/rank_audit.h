// RankAudit compares what ranks that share the model have done, and raises if they have parted.
//
// Example: rank 1 has skipped a step. At the end of the next backward all ranks raise.
// Ownership: borrows the bridge's parts.
// Order: all ranks make the calls that exchange numbers alike.
// Threads: as TorchBridge's hooks.
#pragma once

#include <cstdint>
#include <vector>

#include "bindings/bridge_parts.h"
#include "comm/collectives.h"

namespace noria {

class RankAudit {
 public:
  explicit RankAudit(const BridgeParts& parts) : parts_(parts), adds_to_(0) {}

  /// Notes that a step updates these parameters; `hyperparameters` is a checksum. Ranks that share the model compare
  /// all steps at the end of each backward that sums.
  void note_step(const std::vector<int>& updated, std::uint32_t hyperparameters);
  /// Notes, when a backward begins, to which sums of earlier backwards it adds.
  void note_sums();
  /// Returns the parameters whose gradient has arrived on any rank. Raises UsageError if the ranks have cleared
  /// gradients or stepped differently until now.
  ParameterSet share_arrivals(ParameterSet arrived);
  /// Returns the numbers of all ranks, by rank. Each rank gives the same count. Raises UsageError if the ranks' steps
  /// until now differ.
  std::vector<std::int64_t> exchange(std::vector<std::int64_t> numbers);

 private:
  /// Returns checksums of this rank's steps, which ranks compare.
  std::vector<std::int64_t> steps() const;
  static void refuse_other_steps(const std::vector<std::int64_t>& first, const std::vector<std::int64_t>& its,
                                 std::size_t rank);
  void refuse_other_reductions(const std::vector<std::int64_t>& first, const std::vector<std::int64_t>& its,
                               std::size_t rank) const;

  const BridgeParts& parts_;
  // Checksums over all steps: which parameters were updated, and with which hyperparameters. The order does not count.
  std::uint64_t updated_ = 0, hyperparameters_ = 0;
  ParameterSet adds_to_;  // parameters with sums of earlier backwards, to which the open one adds
};

}  // namespace noria
