#include "engine/peer_places.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/errors.h"

namespace noria {
namespace {

constexpr Bytes kLeastStretch{256 << 10};  // a smaller stretch is not worth the start of another copy

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
Stretches PeerPlaces::take(Bytes bytes) {
  std::vector<std::size_t> peers(peers_.size());
  std::iota(peers.begin(), peers.end(), std::size_t{0});
  const auto left = [this](std::size_t peer) { return peers_[peer].pool.size() - peers_[peer].pool.taken(); };
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

void PeerPlaces::give_back(const Stretches& stretches) {
  for (const Stretch& stretch : stretches) peers_[stretch.peer.value()].pool.give_back(stretch.range);
}

std::optional<std::size_t> PeerPlaces::cut(Bytes bytes, const std::vector<std::size_t>& peers, Stretches& stretches) {
  double all = 0, until = 0;
  for (std::size_t peer : peers) all += peers_[peer].peer.bandwidth;
  Bytes begin;
  for (std::size_t peer : peers) {
    until += peers_[peer].peer.bandwidth;
    const Bytes share{static_cast<std::int64_t>(static_cast<double>(bytes.count) * until / all)};
    const Bytes end = peer == peers.back() ? bytes : std::min(align_up(share, kTensorAlignment), bytes);
    if (end == begin) continue;
    if (!add_stretch(peer, begin, end - begin, stretches)) return peer;
    begin = end;
  }
  return std::nullopt;
}

bool PeerPlaces::add_stretch(std::size_t peer, Bytes begin, Bytes bytes, Stretches& stretches) {
  const auto range = peers_[peer].pool.take(bytes);
  if (!range) return false;
  const PeerMemory& lent = peers_[peer].peer;
  const BufferId copy = buffers_.intern(
      {{Place::Kind::peer, lent.rank}, lent.begin + range->offset, range->bytes, Format::compute, purpose_, UnitId()});
  stretches.push_back({begin, bytes, range->memory, copy, lent.link, peer, *range});
  return true;
}

}  // namespace noria
