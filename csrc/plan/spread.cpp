#include "plan/spread.h"

#include <algorithm>

namespace noria {
namespace {

constexpr Bytes kLeastShare{256 << 10};

}  // namespace

std::vector<PeerShare> spread(Bytes bytes, const std::vector<PeerRoom>& peers) {
  std::vector<std::size_t> chosen;
  for (std::size_t peer = 0; peer < peers.size(); ++peer) {
    if (!peers[peer].is_out) chosen.push_back(peer);
  }
  std::stable_sort(chosen.begin(), chosen.end(),
                   [&](std::size_t a, std::size_t b) { return peers[a].left > peers[b].left; });
  const auto most = static_cast<std::size_t>(std::max<std::int64_t>(bytes.count / kLeastShare.count, 1));
  chosen.resize(std::min(most, chosen.size()));
  double all = 0, until = 0;
  for (std::size_t peer : chosen) all += peers[peer].bandwidth;
  std::vector<PeerShare> shares;
  Bytes begin;
  for (std::size_t peer : chosen) {
    until += peers[peer].bandwidth;
    const Bytes exact{static_cast<std::int64_t>(static_cast<double>(bytes.count) * until / all)};
    const Bytes end = peer == chosen.back() ? bytes : std::min(align_up(exact, kTensorAlignment), bytes);
    if (end == begin) continue;
    shares.push_back({peer, begin, end - begin});
    begin = end;
  }
  return shares;
}

}  // namespace noria
