#include "engine/drainer.h"

#include <iterator>

#include "base/errors.h"

namespace noria {

std::vector<Access> Drainer::open(UnitId unit, Bytes offset) {
  const EngineUnit& owner = units_[static_cast<std::size_t>(unit.value)];
  NORIA_INVARIANT(!open_.contains(unit), "gradient buffer of " + owner.facts.name + " is open already");
  std::byte* memory = leases_.take(offset, owner.facts.gradients, /*is_weights=*/false);
  const BufferId buffer = issuer_.buffers().intern(
      {device_, offset, owner.facts.gradients, Format::compute, Purpose::gradient_buffer, unit});
  open_.emplace(unit, Open{offset, buffer, {}});
  custodian_.open_gradients(unit, memory);
  // Accumulation reads what is held and adds to it on the compute lane, so the drain is always a plain copy.
  return {{owner.facts.held, issuer_.version(owner.facts.held), Access::Mode::read},
          {buffer, issuer_.next_version(buffer), Access::Mode::write}};
}

void Drainer::arrived(UnitId unit, Bytes offset, Bytes bytes) {
  const auto found = open_.find(unit);
  NORIA_INVARIANT(found != open_.end(), "a gradient arrived in a closed buffer");
  auto& ranges = found->second.arrived;
  Bytes start = offset;
  Bytes end = offset + bytes;
  auto next = ranges.upper_bound(start);
  if (next != ranges.begin() && std::prev(next)->second >= start) {
    --next;
    start = next->first;
    end = std::max(end, next->second);
  }
  while (next != ranges.end() && next->first <= end) {
    end = std::max(end, next->second);
    next = ranges.erase(next);
  }
  ranges.emplace(start, end);
}

std::vector<std::pair<UnitId, Bytes>> Drainer::drain_open() {
  std::vector<std::pair<UnitId, Bytes>> drained;
  for (auto& [unit, open] : open_) {
    if (!open.arrived.empty()) {
      const EngineUnit& owner = units_[static_cast<std::size_t>(unit.value)];
      Op op;
      op.lane = Lane::drain;
      op.verb = Verb::drain;
      op.unit = unit;
      Transfer transfer;
      for (const auto& [start, end] : open.arrived) {
        transfer.copies.push_back({owner.held + start.count, leases_.at(open.offset + start), end - start});
        op.bytes += end - start;
      }
      op.accesses = {{open.buffer, issuer_.version(open.buffer), Access::Mode::read},
                     {owner.facts.held, issuer_.next_version(owner.facts.held), Access::Mode::write}};
      drained_ += op.bytes;
      drained.emplace_back(unit, op.bytes);
      issuer_.submit(std::move(op), std::move(transfer));
      landed_.insert(unit);
    }
    close(unit, open);
  }
  open_.clear();
  return drained;
}

void Drainer::abandon() {
  for (auto& [unit, open] : open_) close(unit, open);
  open_.clear();
}

void Drainer::close(UnitId unit, const Open& open) {
  custodian_.close_gradients(unit);
  leases_.release(open.offset);
  issuer_.poison(unit, {open.buffer, issuer_.next_version(open.buffer), Access::Mode::write}, leases_.at(open.offset),
                 units_[static_cast<std::size_t>(unit.value)].facts.gradients);
}

std::vector<UnitId> Drainer::take_landed() {
  std::vector<UnitId> landed(landed_.begin(), landed_.end());
  landed_.clear();
  return landed;
}

}  // namespace noria
