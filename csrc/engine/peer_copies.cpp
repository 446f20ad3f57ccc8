#include "engine/peer_copies.h"

#include "base/errors.h"

namespace noria {

void PeerCopies::shrink_peer(std::int32_t rank, Bytes left) {
  for (auto& [unit, copy] : copies_) places_.give_back(copy.extents);
  copies_.clear();
  const bool is_free = places_.shrink_peer(rank, left);
  NORIA_INVARIANT(is_free, "a copy that is forgotten has a place still");
  place();
  if (const Ticket last = std::exchange(last_, nullptr)) last->wait_passed();
}

void PeerCopies::keep(std::vector<std::pair<UnitId, Bytes>> units) {
  for (auto& [unit, copy] : copies_) places_.give_back(copy.extents);
  copies_.clear();
  kept_ = std::move(units);
  place();
}

void PeerCopies::place() {
  for (const auto& [unit, bytes] : kept_) {
    Extents extents = places_.take(bytes);
    if (!extents.empty()) copies_[unit].extents = std::move(extents);
  }
  stats_.num_units = static_cast<std::int64_t>(copies_.size());
}

bool PeerCopies::holds(UnitId unit, Version version) const {
  const auto copy = copies_.find(unit);
  return copy != copies_.end() && copy->second.version == version;
}

bool PeerCopies::lacks(UnitId unit, Version version) const {
  const auto copy = copies_.find(unit);
  return copy != copies_.end() && copy->second.version != version;
}

void PeerCopies::forget(UnitId unit) {
  const auto copy = copies_.find(unit);
  if (copy != copies_.end()) copy->second.version.reset();
}

void PeerCopies::stash(UnitId unit, const Access& leased, const std::byte* from) {
  Copy& copy = copies_.at(unit);
  copy.version = leased.version;
  std::vector<Access> accesses = {leased};
  Transfer transfer;
  for (const Extent& extent : copy.extents) {
    accesses.push_back({extent.copy, issuer_.next_version(extent.copy), Access::Mode::write});
    transfer.copies.push_back({extent.memory, from + extent.begin.count, extent.bytes, extent.link});
  }
  ++stats_.num_stashed;
  stats_.stashed += transfer.bytes();
  submit(Verb::stash, unit, std::move(accesses), std::move(transfer));
}

void PeerCopies::fetch(UnitId unit, const Access& leased, std::byte* to) {
  const Copy& copy = copies_.at(unit);
  NORIA_INVARIANT(copy.version == leased.version, "a copy at a peer is fetched as another version");
  std::vector<Access> accesses = {leased};
  Transfer transfer;
  for (const Extent& extent : copy.extents) {
    accesses.push_back({extent.copy, issuer_.version(extent.copy), Access::Mode::read});
    transfer.copies.push_back({to + extent.begin.count, extent.memory, extent.bytes, extent.link});
  }
  ++stats_.num_fetched;
  stats_.fetched += transfer.bytes();
  submit(Verb::fetch, unit, std::move(accesses), std::move(transfer));
}

void PeerCopies::submit(Verb verb, UnitId unit, std::vector<Access> accesses, Transfer transfer) {
  Op op;
  op.lane = Lane::peer;
  op.verb = verb;
  op.unit = unit;
  op.bytes = transfer.bytes();
  op.accesses = std::move(accesses);
  last_ = issuer_.submit(std::move(op), std::move(transfer));
}

}  // namespace noria
