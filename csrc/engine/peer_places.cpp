#include "engine/peer_places.h"

#include <algorithm>
#include <string>

#include "base/errors.h"
#include "plan/spread.h"

namespace noria {

void PeerPlaces::add_peer(const PeerMemory& peer) {
  for (const Lent& lent : peers_) {
    NORIA_INVARIANT(lent.peer.rank != peer.rank, "rank " + std::to_string(peer.rank) + " lends a second time");
  }
  Lent& lent = peers_.emplace_back();
  lent.peer = peer;
  lent.pool.add(peer.memory, peer.bytes);
}

bool PeerPlaces::shrink_peer(std::int32_t rank, Bytes left) {
  const auto lent =
      std::find_if(peers_.begin(), peers_.end(), [&](const Lent& each) { return each.peer.rank == rank; });
  NORIA_INVARIANT(lent != peers_.end(), "rank " + std::to_string(rank) + " lends nothing");
  lent->pool.shrink(left);
  return lent->pool.taken_beyond() == Bytes{0};
}

Extents PeerPlaces::take(Bytes bytes) {
  std::vector<PeerRoom> rooms;
  for (const Lent& each : peers_) rooms.push_back({each.peer.bandwidth, each.pool.size() - each.pool.taken()});
  while (true) {
    Extents extents;
    const std::vector<PeerShare> shares = spread(bytes, rooms);
    const auto lacking = std::find_if_not(shares.begin(), shares.end(), [&](const PeerShare& share) {
      return add_extent(share.peer, share.begin, share.bytes, extents);
    });
    if (lacking == shares.end()) return extents;
    give_back(extents);
    rooms[lacking->peer].is_out = true;
  }
}

void PeerPlaces::give_back(const Extents& extents) {
  for (const Extent& extent : extents) peers_[extent.peer.value()].pool.give_back(extent.range);
}

bool PeerPlaces::add_extent(std::size_t peer, Bytes begin, Bytes bytes, Extents& extents) {
  const auto range = peers_[peer].pool.take(bytes);
  if (!range) return false;
  const PeerMemory& lent = peers_[peer].peer;
  const BufferId copy = buffers_.intern(
      {{Place::Kind::peer, lent.rank}, lent.begin + range->offset, range->bytes, Format::compute, purpose_, UnitId()});
  extents.push_back({begin, bytes, range->memory, copy, lent.link, peer, *range});
  return true;
}

}  // namespace noria
