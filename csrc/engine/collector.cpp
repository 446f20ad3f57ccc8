#include "engine/collector.h"

#include <algorithm>
#include <utility>

namespace noria {

Collector::Collector(Issuer& issuer, const std::vector<EngineUnit>& units, std::shared_ptr<CollectLane> lane,
                     CollectScratch scratch, bool takes_sums)
    : issuer_(issuer),
      units_(units),
      lane_(std::move(lane)),
      scratch_(scratch),
      takes_sums_(takes_sums),
      versions_(units.size(), 0),
      summed_(units.size()),
      is_stale_(units.size(), true) {}

std::byte* Collector::wide_scratch(ElementType type) const {
  const bool is_narrow = type == ElementType::bf16 || type == ElementType::fp16;
  return is_narrow ? scratch_.wide : nullptr;
}

void Collector::submit(Op op, Collective collective) {
  Standing where = standing();
  where.version = versions_[static_cast<std::size_t>(op.unit.value)];
  auto begun = issuer_.begin(op);
  issuer_.keep(op.id, lane_->submit(begun.label, std::move(collective), std::move(begun.waits), std::move(where)));
}

Standing Collector::standing() {
  Standing where;
  where.phase = phase_;
  where.shares = shares();
  where.num_broken = num_broken_;
  return where;
}

std::shared_ptr<const Shares> Collector::shares() {
  for (UnitId unit : issuer_.take_touched()) is_stale_[static_cast<std::size_t>(unit.value)] = true;
  if (std::find(is_stale_.begin(), is_stale_.end(), true) == is_stale_.end()) return shares_;
  auto made = shares_ ? std::make_shared<Shares>(*shares_) : std::make_shared<Shares>();
  made->of.resize(units_.size());
  for (std::size_t i = 0; i < units_.size(); ++i) {
    if (!is_stale_[i]) continue;
    made->of[i] = share_of(i);
    is_stale_[i] = false;
  }
  shares_ = std::move(made);
  return shares_;
}

std::shared_ptr<const Share> Collector::share_of(std::size_t index) const {
  const EngineUnit& unit = units_[index];
  const Shards shards = this->shards();
  auto share = std::make_shared<Share>();
  share->version = versions_[index];
  const Bytes trainable = shards.bytes_of(unit.facts.gradients);
  const Bytes frozen = shards.bytes_of(unit.facts.weights - unit.facts.gradients);
  if (trainable > Bytes{0}) share->weights.push_back({unit.working, trainable, scratch_.part});
  if (frozen > Bytes{0}) share->weights.push_back({unit.working + trainable.count, frozen, scratch_.part});
  share->before_read = issuer_.before({unit.facts.working, issuer_.version(unit.facts.working), Access::Mode::read});
  if (unit.held == nullptr || !takes_sums_) return share;
  Taking& taking = share->gradient;
  taking = {unit.held, trainable, unit.type, scratch_.part, wide_scratch(unit.type), {}};
  const Bytes begin = shards.begin_of(unit.facts.gradients);
  for (const auto& [from, to] : summed_[index].within(begin, begin + trainable)) {
    taking.add.emplace_back(from - begin, to - begin);
  }
  share->before_write = issuer_.before({unit.facts.held, issuer_.version(unit.facts.held), Access::Mode::write});
  return share;
}

void Collector::note_assisted() {
  Op op;
  op.lane = Lane::collect;
  op.verb = Verb::gather;
  op.unit = UnitId(0);  // any unit: it accesses nothing
  submit(std::move(op), {});
}

void Collector::note_taken(UnitId unit) {
  add_summed(unit);
  const BufferId held = units_[static_cast<std::size_t>(unit.value)].facts.held;
  Op op;  // stands for what has been done: later ops wait for it, and for what it came after
  op.lane = Lane::collect;
  op.verb = Verb::reduce;
  op.unit = unit;
  op.accesses = {{held, issuer_.next_version(held), Access::Mode::write}};
  submit(std::move(op), {});
}

void Collector::add_summed(UnitId unit) {
  const auto index = static_cast<std::size_t>(unit.value);
  summed_[index].add({}, units_[index].facts.gradients);
  is_stale_[index] = true;
}

void Collector::forget_summed(UnitId unit, Bytes offset, Bytes bytes) {
  summed_[static_cast<std::size_t>(unit.value)].remove(offset, offset + bytes);
  is_stale_[static_cast<std::size_t>(unit.value)] = true;
}

void Collector::forget_summed(UnitId unit) {
  summed_[static_cast<std::size_t>(unit.value)].clear();
  is_stale_[static_cast<std::size_t>(unit.value)] = true;
}

void Collector::set_version(UnitId unit, std::int64_t version) {
  versions_[static_cast<std::size_t>(unit.value)] = version;
  is_stale_[static_cast<std::size_t>(unit.value)] = true;
}

}  // namespace noria
