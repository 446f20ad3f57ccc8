#include "engine/fetcher.h"

#include "base/errors.h"

namespace noria {

void Fetcher::fetch(UnitId unit, Bytes offset) {
  const EngineUnit& source = units_[unit];
  NORIA_INVARIANT(!resident_.contains(unit), "unit " + source.facts.name + " is fetched twice");
  std::byte* to = leases_.take(offset, source.facts.weights, /*is_weights=*/true);
  const BufferId buffer =
      issuer_.buffers().intern({device_, offset, source.facts.weights, Format::compute, Purpose::weights, unit});
  const Version version = issuer_.version(source.facts.working);
  const Held into{offset, buffer, version};
  resident_.emplace(unit, into);
  ++num_fetches_;
  ++times_fetched_[unit];
  if (copies_.holds(unit, version)) {
    copies_.fetch(unit, {buffer, version, Access::Mode::write}, to);
    return;
  }
  if (collector_ != nullptr && collector_->shards().size > 1) {
    fetched_ += fetch_shards(source, into, unit);
    return;
  }
  Op op;
  op.lane = Lane::fetch;
  op.verb = Verb::fetch;
  op.unit = unit;
  op.bytes = source.facts.weights;
  op.accesses = {{source.facts.working, version, Access::Mode::read}, {buffer, version, Access::Mode::write}};
  const auto brought = bring(unit, op);
  Transfer transfer;
  for (const HomePart& part : home_parts(source.facts, source.working, Shards{})) {
    add_copies(transfer.copies, to, part, source, brought);
  }
  issuer_.submit(std::move(op), std::move(transfer));
  fetched_ += source.facts.weights;
}

Bytes Fetcher::fetch_shards(const EngineUnit& source, const Held& into, UnitId unit) {
  const Shards shards = collector_->shards();
  Op fetch;
  fetch.lane = Lane::fetch;
  fetch.verb = Verb::fetch;
  fetch.unit = unit;
  fetch.accesses = {{source.facts.working, into.version, Access::Mode::read}};
  const auto brought = bring(unit, fetch);
  Op gather;
  gather.lane = Lane::collect;
  gather.verb = Verb::gather;
  gather.unit = unit;
  gather.bytes = source.facts.weights;
  Transfer transfer;
  Collective collective;
  for (const HomePart& part : home_parts(source.facts, source.working, shards)) {
    const Bytes own = into.offset + part.begin;
    const BufferId slice =
        issuer_.buffers().intern({device_, own, part.bytes, Format::compute, Purpose::weights, unit});
    fetch.accesses.push_back({slice, into.version, Access::Mode::write});
    gather.accesses.push_back({slice, into.version, Access::Mode::read});
    add_copies(transfer.copies, leases_.at(own), part, source, brought);
    collective.gathers.push_back({leases_.at(own - part.bytes * shards.rank), part.bytes});
    fetch.bytes += part.bytes;
  }
  gather.accesses.push_back({into.buffer, into.version, Access::Mode::write});
  const Bytes fetched = fetch.bytes;
  issuer_.submit(std::move(fetch), std::move(transfer));
  collector_->submit(std::move(gather), std::move(collective));
  return fetched;
}

// If weights of the unit lie in a file, issues their read, and adds what the fetch accesses.
std::optional<FileWeights::Brought> Fetcher::bring(UnitId unit, Op& fetch) {
  if (files_ == nullptr || !files_->has(unit)) return std::nullopt;
  const FileWeights::Brought brought = files_->bring(unit);
  fetch.accesses.push_back(brought.access);
  return brought;
}

void Fetcher::add_copies(std::vector<CopySpan>& copies, std::byte* to, const HomePart& part, const EngineUnit& source,
                         const std::optional<FileWeights::Brought>& brought) {
  for (const HomePiece& piece : pieces_of(part, source.working, source.in_file)) {
    copies.push_back({to + piece.begin.count, piece.is_in_file ? brought->memory : piece.memory, piece.bytes});
  }
}

void Fetcher::stash(UnitId unit) {
  const Held& held = this->held(unit);
  if (!is_current(unit) || !copies_.lacks(unit, held.version)) return;
  copies_.stash(unit, access(unit), leases_.at(held.offset));
}

void Fetcher::evict(UnitId unit) {
  const Held held = this->held(unit);
  leases_.release(held.offset);
  resident_.erase(unit);
  issuer_.poison(unit, {held.buffer, -1, Access::Mode::write}, leases_.at(held.offset), units_[unit].facts.weights);
}

void Fetcher::mark_stale(UnitId unit) {
  copies_.forget(unit);
  const auto found = resident_.find(unit);
  if (found != resident_.end()) found->second.version = -1;
}

void Fetcher::evict_stale() {
  std::vector<UnitId> stale;
  for (const auto& [unit, held] : resident_) {
    if (!is_current(unit)) stale.push_back(unit);
  }
  for (UnitId unit : stale) evict(unit);
}

void Fetcher::evict_all() {
  while (!resident_.empty()) evict(resident_.begin()->first);
}

bool Fetcher::is_current(UnitId unit) const {
  const auto found = resident_.find(unit);
  if (found == resident_.end()) return false;
  const UnitFacts& facts = units_[unit].facts;
  return found->second.version == issuer_.version(facts.working);
}

std::vector<Resident> Fetcher::residents() const {
  std::vector<Resident> result;
  for (const auto& [unit, held] : resident_) {
    if (is_current(unit)) result.push_back({unit, held.offset});
  }
  return result;
}

std::byte* Fetcher::address(UnitId unit) const { return leases_.at(held(unit).offset); }

Access Fetcher::access(UnitId unit) const {
  const Held& held = this->held(unit);
  return {held.buffer, held.version, Access::Mode::read};
}

const Fetcher::Held& Fetcher::held(UnitId unit) const {
  const auto found = resident_.find(unit);
  NORIA_INVARIANT(found != resident_.end(), "unit " + units_[unit].facts.name + " is not on the device");
  return found->second;
}

}  // namespace noria
