#include "engine/collector.h"

#include <utility>

namespace noria {

Collector::Collector(Issuer& issuer, const UnitTable& units, std::shared_ptr<CollectLane> lane, CollectScratch scratch,
                     bool takes_sums)
    : issuer_(issuer),
      units_(units),
      lane_(std::move(lane)),
      scratch_(scratch),
      takes_sums_(takes_sums),
      versions_(units.size(), 0),
      reduced_(units.size()),
      is_stale_(units.size(), true) {}

std::byte* Collector::wide_scratch(ElementType type) const {
  const bool is_narrow = type == ElementType::bf16 || type == ElementType::fp16;
  return is_narrow ? scratch_.wide : nullptr;
}

void Collector::submit(Op op, Collective collective) {
  RankPosition where = position();
  where.version = versions_[op.unit];
  auto begun = issuer_.begin(op);
  issuer_.keep(op.id, lane_->submit(begun.label, std::move(collective), std::move(begun.waits), std::move(where)));
}

RankPosition Collector::position() {
  RankPosition where;
  where.phase = phase_;
  if (lane_->assists()) where.unit_shards = unit_shards();
  where.num_broken = num_broken_;
  return where;
}

std::shared_ptr<const UnitShards> Collector::unit_shards() {
  for (UnitId unit : issuer_.take_touched()) is_stale_[unit] = true;
  std::shared_ptr<UnitShards> made;
  for (UnitId unit : units_.ids()) {
    if (!std::exchange(is_stale_[unit], false)) continue;
    if (!made) made = unit_shards_ ? std::make_shared<UnitShards>(*unit_shards_) : std::make_shared<UnitShards>();
    if (made->of.empty()) made->of = UnitMap<std::shared_ptr<const UnitShard>>(units_.size());
    made->of[unit] = shard_of(unit);
  }
  if (made) unit_shards_ = std::move(made);
  return unit_shards_;
}

std::shared_ptr<const UnitShard> Collector::shard_of(UnitId id) const {
  const EngineUnit& unit = units_[id];
  const Shards shards = this->shards();
  auto shard = std::make_shared<UnitShard>();
  shard->version = versions_[id];
  const Bytes trainable = shards.bytes_of(unit.facts.gradients);
  for (const HomePart& part : home_parts(unit.facts, unit.working, shards)) {
    ShardSend& sent = shard->weights.emplace_back();
    for (const HomePiece& piece : pieces_of(part, unit.working, unit.in_file)) {
      sent.own.emplace_back(piece.memory, piece.bytes);
    }
    sent.shard = part.bytes;
    sent.scratch = scratch_.shard;
  }
  shard->before_read = issuer_.before({unit.facts.working, issuer_.version(unit.facts.working), Access::Mode::read});
  if (unit.held == nullptr || !takes_sums_) return shard;
  ShardReceive& taking = shard->gradient;
  taking = {unit.held, trainable, unit.type, scratch_.shard, wide_scratch(unit.type), {}};
  const Bytes begin = shards.begin_of(unit.facts.gradients);
  for (const auto& [from, to] : reduced_[id].within(begin, begin + trainable)) {
    taking.add.emplace_back(from - begin, to - begin);
  }
  shard->before_write = issuer_.before({unit.facts.held, issuer_.version(unit.facts.held), Access::Mode::write});
  return shard;
}

void Collector::note_assisted() {
  Op op;
  op.lane = Lane::collect;
  op.verb = Verb::gather;
  op.unit = UnitId(0);  // any unit: it accesses nothing
  submit(std::move(op), {});
}

void Collector::note_taken(UnitId unit) {
  add_reduced(unit, {}, units_[unit].facts.gradients);
  const BufferId held = units_[unit].facts.held;
  Op op;  // stands for what has been done: later ops wait for it, and for what it came after
  op.lane = Lane::collect;
  op.verb = Verb::reduce;
  op.unit = unit;
  op.accesses = {{held, issuer_.next_version(held), Access::Mode::write}};
  submit(std::move(op), {});
}

void Collector::add_reduced(UnitId unit, Bytes offset, Bytes bytes) {
  reduced_[unit].add(offset, offset + bytes);
  is_stale_[unit] = true;
}

void Collector::forget_reduced(UnitId unit, Bytes offset, Bytes bytes) {
  reduced_[unit].remove(offset, offset + bytes);
  is_stale_[unit] = true;
}

void Collector::forget_reduced(UnitId unit) {
  reduced_[unit].clear();
  is_stale_[unit] = true;
}

void Collector::set_version(UnitId unit, std::int64_t version) {
  versions_[unit] = version;
  is_stale_[unit] = true;
}

}  // namespace noria
