#include "engine/saved_places.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/errors.h"
#include "engine/unit.h"

namespace noria {
namespace {

constexpr Bytes kLeastStretch{256 << 10};  // less is not worth the start of another copy

}  // namespace

void SavedPlaces::add_peer(const PeerMemory& peer) {
  for (const Store& store : stores_) {
    NORIA_INVARIANT(!store.peer || store.peer->rank != peer.rank,
                    "rank " + std::to_string(peer.rank) + " lends a second time");
  }
  Store& store = stores_.emplace_back();
  store.peer = peer;
  store.pool.add(peer.memory, peer.bytes);
}

bool SavedPlaces::shrink_peer(std::int32_t rank, Bytes left) {
  const auto store = std::find_if(stores_.begin(), stores_.end(),
                                  [&](const Store& each) { return each.peer && each.peer->rank == rank; });
  NORIA_INVARIANT(store != stores_.end(), "rank " + std::to_string(rank) + " lends nothing");
  store->pool.shrink(left);
  return store->pool.taken_beyond() == Bytes{0};
}

SavedPlaces::Stretches SavedPlaces::take(Bytes bytes, bool of_home) {
  Stretches stretches = of_home ? Stretches{} : take_of_peers(bytes);
  if (!stretches.empty() || add_stretch(kHome, {}, bytes, stretches)) return stretches;
  const auto [memory, more] = custodian_.more_home(bytes);
  stores_[kHome].pool.add(memory, more);
  NORIA_INVARIANT(add_stretch(kHome, {}, bytes, stretches),
                  "there is no room for what a forward saves after more has been taken");
  return stretches;
}

void SavedPlaces::give_back(const Stretches& stretches) {
  for (const Stretch& stretch : stretches) stores_[stretch.store].pool.give_back(stretch.range);
}

// Those with the most left first, as many as the size is worth. Who has not enough in one range is left out.
SavedPlaces::Stretches SavedPlaces::take_of_peers(Bytes bytes) {
  std::vector<std::size_t> peers;
  for (std::size_t store = kHome + 1; store < stores_.size(); ++store) peers.push_back(store);
  const auto left = [this](std::size_t store) { return stores_[store].pool.size() - stores_[store].pool.taken(); };
  std::stable_sort(peers.begin(), peers.end(), [&](std::size_t a, std::size_t b) { return left(a) > left(b); });
  const auto most = static_cast<std::size_t>(std::max<std::int64_t>(bytes.count / kLeastStretch.count, 1));
  while (!peers.empty()) {
    Stretches stretches;
    const auto end = peers.begin() + static_cast<std::ptrdiff_t>(std::min(most, peers.size()));
    const auto lacking = cut(bytes, {peers.begin(), end}, stretches);
    if (!lacking) return stretches;
    give_back(stretches);
    std::erase(peers, *lacking);
  }
  return {};
}

std::optional<std::size_t> SavedPlaces::cut(Bytes bytes, const std::vector<std::size_t>& peers, Stretches& stretches) {
  double all = 0, until = 0;
  for (std::size_t store : peers) all += stores_[store].peer->bandwidth;
  Bytes begin;
  for (std::size_t store : peers) {
    until += stores_[store].peer->bandwidth;
    const Bytes share{static_cast<std::int64_t>(static_cast<double>(bytes.count) * until / all)};
    const Bytes end = store == peers.back() ? bytes : std::min(align_up(share, kTensorAlignment), bytes);
    if (end == begin) continue;
    if (!add_stretch(store, begin, end - begin, stretches)) return store;
    begin = end;
  }
  return std::nullopt;
}

bool SavedPlaces::add_stretch(std::size_t store, Bytes begin, Bytes bytes, Stretches& stretches) {
  const auto range = stores_[store].pool.take(bytes);
  if (!range) return false;
  const std::optional<PeerMemory>& peer = stores_[store].peer;
  const Place place = peer ? Place{Place::Kind::peer, peer->rank} : Place{Place::Kind::host, kSavedCopiesRegion};
  const Bytes offset = range->offset + (peer ? peer->begin : Bytes{0});
  const BufferId copy = buffers_.intern({place, offset, range->bytes, Format::compute, purpose_, UnitId()});
  stretches.push_back({begin, bytes, range->memory, copy, peer ? peer->link : 0, store, *range});
  return true;
}

}  // namespace noria
