#include "engine/drainer.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace noria {
namespace {

// Copies these ranges of a unit's gradient between two places where it begins.
Transfer copy_of(const Ranges& ranges, std::byte* to, const std::byte* from) {
  Transfer transfer;
  for (const auto& [begin, end] : ranges) {
    transfer.copies.push_back({to + begin.count, from + begin.count, end - begin});
  }
  return transfer;
}

}  // namespace

void Drainer::bring(UnitId unit, Bytes offset) {
  const EngineUnit& owner = units_[unit];
  NORIA_INVARIANT(!open_.contains(unit) && !to_come_.contains(unit),
                  "gradient buffer of " + owner.facts.name + " is open already");
  leases_.take(offset, owner.facts.gradients, /*is_weights=*/false);
  const BufferId buffer = issuer_.buffers().intern(
      {device_, offset, owner.facts.gradients, Format::compute, Purpose::gradient_buffer, unit});
  Open& coming = to_come_.emplace(unit, Open{offset, buffer, {}, {}}).first->second;
  coming.brought = collector_ == nullptr ? callbacks_.held_gradients(unit) : unreduced_[unit];
  coming.is_taken_up = coming.brought.empty();
  if (coming.is_taken_up) return;
  const Held from = held(unit);
  Op op;
  op.lane = Lane::fetch;
  op.verb = Verb::fetch;
  op.unit = unit;
  Transfer transfer = copy_of(coming.brought, leases_.at(offset), from.memory);
  op.bytes = transfer.bytes();
  coming.of = issuer_.version(from.buffer);
  op.accesses = {{from.buffer, coming.of, Access::Mode::read},
                 {buffer, issuer_.next_version(buffer), Access::Mode::write}};
  brought_ += op.bytes;
  issuer_.submit(std::move(op), std::move(transfer));
}

std::vector<Access> Drainer::open(UnitId unit, Bytes offset) {
  if (!to_come_.contains(unit)) bring(unit, offset);
  const Open& open = open_.insert(to_come_.extract(unit)).position->second;
  NORIA_INVARIANT(open.offset == offset, "a gradient buffer was brought to another place than planned");
  callbacks_.open_gradients(unit, leases_.at(offset));
  if (!open.is_taken_up) return {};
  return accesses(unit, open);
}

void Drainer::give_back_brought() {
  for (auto& [unit, coming] : to_come_) release(unit, coming);
  to_come_.clear();
}

Drainer::Held Drainer::held(UnitId unit) const {
  const EngineUnit& owner = units_[unit];
  if (collector_ == nullptr) return {owner.held, owner.facts.held};  // else the collect lane adds the sum to that
  return {owner.unreduced, owner.unreduced_buffer};
}

std::vector<Access> Drainer::accesses(UnitId unit, const Open& open) {
  std::vector<Access> made = {{open.buffer, issuer_.next_version(open.buffer), Access::Mode::write}};
  const Held adds_to = held(unit);
  if (adds_to.memory != nullptr) made.push_back({adds_to.buffer, issuer_.version(adds_to.buffer), Access::Mode::read});
  return made;
}

std::vector<Access> Drainer::take_up(UnitId unit) {
  Open& open = open_.at(unit);
  if (std::exchange(open.is_taken_up, true)) return {};
  return accesses(unit, open);
}

bool Drainer::is_brought(UnitId unit, Bytes offset, Bytes bytes) const {
  const Open& open = open_.at(unit);
  return open.of == issuer_.version(held(unit).buffer) && open.brought.missing(offset, offset + bytes).empty();
}

void Drainer::arrived(UnitId unit, Bytes offset, Bytes bytes) {
  const auto found = open_.find(unit);
  NORIA_INVARIANT(found != open_.end(), "a gradient arrived in a closed buffer");
  found->second.arrived.add(offset, offset + bytes);
}

std::vector<std::pair<UnitId, Bytes>> Drainer::drain_open() {
  std::vector<std::pair<UnitId, Bytes>> drained;
  for (auto& [unit, open] : open_) {
    if (!open.arrived.empty() || (takes_rest() && !unreduced_[unit].empty())) {
      const EngineUnit& owner = units_[unit];
      Bytes bytes;
      if (collector_ == nullptr) {
        bytes = drain(unit, open, owner.held, owner.facts.held);
      } else if (unsynced_) {
        bytes = drain(unit, open, owner.unreduced, owner.unreduced_buffer);
        for (const auto& [begin, end] : open.arrived) unreduced_[unit].add(begin, end);
      } else {
        bytes = sum(unit, open);
      }
      drained_ += bytes;
      drained.emplace_back(unit, bytes);
      landed_.insert(unit);
    }
    close(unit, open, /*is_drained=*/true);
  }
  open_.clear();
  return drained;
}

Bytes Drainer::drain(UnitId unit, const Open& open, std::byte* to, BufferId into) {
  Op op;
  op.lane = Lane::drain;
  op.verb = Verb::drain;
  op.unit = unit;
  Transfer transfer = copy_of(open.arrived, to, leases_.at(open.offset));
  op.bytes = transfer.bytes();
  op.accesses = {{open.buffer, issuer_.version(open.buffer), Access::Mode::read},
                 {into, issuer_.next_version(into), Access::Mode::write}};
  const Bytes bytes = op.bytes;
  issuer_.submit(std::move(op), std::move(transfer));
  return bytes;
}

Bytes Drainer::sum(UnitId unit, const Open& open) {
  const EngineUnit& owner = units_[unit];
  const Shards shards = collector_->shards();
  const Bytes whole = owner.facts.gradients;
  const Bytes shard = shards.bytes_of(whole);
  const Bytes begin = shards.begin_of(whole);
  const BufferId slice =
      issuer_.buffers().intern({device_, open.offset + begin, shard, Format::compute, Purpose::gradient_buffer, unit});

  Op reduce;
  reduce.lane = Lane::collect;
  reduce.verb = Verb::reduce;
  reduce.unit = unit;
  reduce.bytes = whole;
  reduce.accesses = {{open.buffer, issuer_.next_version(open.buffer), Access::Mode::write}};
  Collective collective;
  Reduction& reduction = collective.reduction;
  reduction.all = leases_.at(open.offset);
  reduction.shard = shard;
  reduction.type = owner.type;
  reduction.scratch = collector_->wide_scratch(owner.type);
  reduction.part = collector_->shard_scratch();
  Ranges& unreduced = unreduced_[unit];
  // What arrived has been added to what lay there. The rest may still arrive, in another visit of this backward.
  for (const auto& [from, to] : open.arrived) unreduced.remove(from, to);
  if (tells_arrivals_) tell_arrivals(unit, open, reduction);
  Ranges filled = open.arrived;
  if (takes_rest()) {
    for (const auto& [from, to] : unreduced) filled.add(from, to);  // brought when the buffer was opened
    unreduced.clear();
  }
  for (const auto& [from, to] : filled.missing({}, whole)) {
    reduction.zero.emplace_back(leases_.at(open.offset + from), to - from);
  }
  for (const auto& [from, to] : collector_->reduced(unit).within(begin, begin + shard)) {
    reduction.add.push_back({leases_.at(open.offset + from), owner.held + (from - begin).count, to - from});
  }
  if (!reduction.add.empty()) {
    reduce.accesses.push_back({owner.facts.held, issuer_.version(owner.facts.held), Access::Mode::read});
  }
  reduced_ += collective.received(shards);
  collector_->submit(std::move(reduce), std::move(collective));
  collector_->add_reduced(unit, {}, whole);

  Op drain;
  drain.lane = Lane::drain;
  drain.verb = Verb::drain;
  drain.unit = unit;
  drain.bytes = shard;
  drain.accesses = {{slice, issuer_.version(open.buffer), Access::Mode::read},
                    {owner.facts.held, issuer_.next_version(owner.facts.held), Access::Mode::write}};
  Transfer transfer;
  transfer.copies.push_back({owner.held, leases_.at(open.offset + begin), shard});
  issuer_.submit(std::move(drain), std::move(transfer));
  return shard;
}

void Drainer::tell_arrivals(UnitId unit, const Open& open, Reduction& reduction) {
  const std::vector<Bytes>& offsets = units_[unit].gradient_offsets;
  const auto own = std::make_shared<ParameterSet>(offsets.size());
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    const Bytes end = offsets[i] + Bytes{1};
    if (!open.arrived.within(offsets[i], end).empty() || !unreduced_[unit].within(offsets[i], end).empty()) own->add(i);
  }
  if (!arrivals_[unit]) arrivals_[unit] = std::make_shared<ParameterSet>(offsets.size());
  reduction.arrived = own;
  reduction.arrived_anywhere = arrivals_[unit];
}

std::shared_ptr<const ParameterSet> Drainer::take_arrivals(UnitId unit) {
  return std::exchange(arrivals_[unit], nullptr);
}

void Drainer::forget_reduced(UnitId unit) {
  if (collector_ != nullptr) collector_->forget_reduced(unit);
}

std::vector<UnitId> Drainer::left_unreduced() const {
  std::vector<UnitId> left;
  if (unsynced_) return left;
  for (UnitId unit : unreduced_.ids()) {
    if (!unreduced_[unit].empty()) left.push_back(unit);
  }
  std::reverse(left.begin(), left.end());  // as in comm/collect_lane.h, Note [Agreement]
  return left;
}

bool Drainer::is_unreduced(UnitId unit, Bytes offset, Bytes bytes) const {
  return !unreduced_[unit].within(offset, offset + bytes).empty();
}

bool Drainer::is_reduced(UnitId unit, Bytes offset, Bytes bytes) const {
  return collector_ != nullptr && !collector_->reduced(unit).within(offset, offset + bytes).empty();
}

void Drainer::note_reduced(UnitId unit, Bytes offset, Bytes bytes) {
  if (collector_ != nullptr) collector_->add_reduced(unit, offset, bytes);
}

void Drainer::forget(UnitId unit, Bytes offset, Bytes bytes) {
  if (collector_ != nullptr) collector_->forget_reduced(unit, offset, bytes);
  unreduced_[unit].remove(offset, offset + bytes);
}

void Drainer::abandon() {
  for (auto& [unit, open] : open_) close(unit, open, /*is_drained=*/false);
  open_.clear();
  reduces_rest_ = false;
}

void Drainer::close(UnitId unit, const Open& open, bool is_drained) {
  callbacks_.close_gradients(unit, is_drained);
  release(unit, open);
}

void Drainer::release(UnitId unit, const Open& open) {
  leases_.release(open.offset);
  issuer_.poison(unit, {open.buffer, issuer_.next_version(open.buffer), Access::Mode::write}, leases_.at(open.offset),
                 units_[unit].facts.gradients);
}

std::vector<UnitId> Drainer::take_landed() {
  std::vector<UnitId> landed(landed_.begin(), landed_.end());
  landed_.clear();
  return landed;
}

}  // namespace noria
