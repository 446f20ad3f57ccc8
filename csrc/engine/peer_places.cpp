#include "engine/peer_places.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/errors.h"

namespace noria {
namespace {

constexpr Bytes kLeastExtent{256 << 10};  // a smaller extent is not worth the start of another copy

}  // namespace

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

// Takes the peers with the most left first. More bytes are split over more peers. Leaves out a peer that has too little
// in one range.
Extents PeerPlaces::take(Bytes bytes) {
  std::vector<std::size_t> peers(peers_.size());
  std::iota(peers.begin(), peers.end(), std::size_t{0});
  const auto left = [this](std::size_t peer) { return peers_[peer].pool.size() - peers_[peer].pool.taken(); };
  std::stable_sort(peers.begin(), peers.end(), [&](std::size_t a, std::size_t b) { return left(a) > left(b); });
  const auto most = static_cast<std::size_t>(std::max<std::int64_t>(bytes.count / kLeastExtent.count, 1));
  while (!peers.empty()) {
    Extents extents;
    const auto end = peers.begin() + static_cast<std::ptrdiff_t>(std::min(most, peers.size()));
    const auto lacking = cut(bytes, {peers.begin(), end}, extents);
    if (!lacking) return extents;
    give_back(extents);
    std::erase(peers, *lacking);
  }
  return {};
}

void PeerPlaces::give_back(const Extents& extents) {
  for (const Extent& extent : extents) peers_[extent.peer.value()].pool.give_back(extent.range);
}

std::optional<std::size_t> PeerPlaces::cut(Bytes bytes, const std::vector<std::size_t>& peers, Extents& extents) {
  double all = 0, until = 0;
  for (std::size_t peer : peers) all += peers_[peer].peer.bandwidth;
  Bytes begin;
  for (std::size_t peer : peers) {
    until += peers_[peer].peer.bandwidth;
    const Bytes share{static_cast<std::int64_t>(static_cast<double>(bytes.count) * until / all)};
    const Bytes end = peer == peers.back() ? bytes : std::min(align_up(share, kTensorAlignment), bytes);
    if (end == begin) continue;
    if (!add_extent(peer, begin, end - begin, extents)) return peer;
    begin = end;
  }
  return std::nullopt;
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
