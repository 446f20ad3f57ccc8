// Collector issues gathers and sums between ranks. It also tells the collect lane which version each unit's weights
// have, and which gradients have been summed. The lane needs both to assist other ranks.
//
// Ownership: borrows issuer and units from the engine, shares the lane. Order: ops are issued in the order of the
// calls. Threads: the caller serialises; nothing here blocks.
//
// Note [Versions]. The version of a buffer counts writes, and ranks may make different numbers of writes: one rank
// keeps a draft, another undoes it. So ranks compare the step or load that made the weights.
#pragma once

#include <memory>
#include <vector>

#include "base/ranges.h"
#include "comm/collect_lane.h"
#include "engine/issuer.h"
#include "engine/unit_table.h"

namespace noria {

/// Refers to device memory for what ranks sum and give. `wide`: 4 bytes for each element of the largest unit's
/// gradients of 16 bits, to reduce them in fp32. Null: they are reduced as they are. `shard`: as large as the largest
/// shard.
struct CollectScratch {
  std::byte* wide = nullptr;
  std::byte* shard = nullptr;
};

class Collector {
 public:
  /// `takes_sums`: this rank takes sums of gradients that only other ranks have. If false, such sums raise, because
  /// what is reduced is used up inside backward.
  Collector(Issuer& issuer, const UnitTable& units, std::shared_ptr<CollectLane> lane, CollectScratch scratch,
            bool takes_sums);

  Shards shards() const { return lane_->shards(); }
  /// Returns the memory that sums of this type are made in; null: the gradients' own memory.
  std::byte* wide_scratch(ElementType type) const;
  std::byte* shard_scratch() const { return scratch_.shard; }

  /// A pass of this phase begins.
  void turn(Phase phase) { phase_ = phase; }
  void submit(Op op, Collective collective);
  /// Returns where this rank stands, for a caller that asks the lane itself to exchange numbers.
  RankPosition position();
  /// The lane has assisted, and no op of its own stands for that. Submits such an op.
  void note_assisted();
  /// Sums of this unit's gradients have come to the held one while the lane assisted.
  void note_taken(UnitId unit);

  void note_update(UnitId unit) { set_version(unit, num_steps_ + 1); }
  void note_load(UnitId unit) { set_version(unit, -1 - num_steps_); }
  void end_step() { ++num_steps_; }
  /// A backward that sums has raised.
  void note_broken() { ++num_broken_; }

  /// Returns the ranges of the unit's gradients that have been summed. This rank holds its shard of these sums.
  const Ranges& reduced(UnitId unit) const { return reduced_[unit]; }
  void add_reduced(UnitId unit, Bytes offset, Bytes bytes);
  void forget_reduced(UnitId unit, Bytes offset, Bytes bytes);
  /// All of the unit's sums have been used up.
  void forget_reduced(UnitId unit);

 private:
  std::shared_ptr<const UnitShards> unit_shards();
  void set_version(UnitId unit, std::int64_t version);
  std::shared_ptr<const UnitShard> shard_of(UnitId unit) const;

  Issuer& issuer_;
  const UnitTable& units_;
  const std::shared_ptr<CollectLane> lane_;
  const CollectScratch scratch_;
  const bool takes_sums_;
  Phase phase_ = Phase::forward;
  std::int64_t num_steps_ = 0;
  std::int64_t num_broken_ = 0;
  UnitMap<std::int64_t> versions_;  // see UnitShard
  UnitMap<Ranges> reduced_;
  UnitMap<bool> is_stale_;  // `unit_shards_` is out of date
  std::shared_ptr<const UnitShards> unit_shards_;
};

}  // namespace noria
