// Spreads what goes to peers over their links, so that all copies end together.
//
// A pure function. Example: 3 MiB go to two peers, and the link to the first is twice as fast: it gets 2 MiB.
// Units: bytes; bandwidth relative to the other links.
#pragma once

#include <cstddef>
#include <vector>

#include "base/bytes.h"

namespace noria {

struct PeerRoom {
  double bandwidth = 1;  // of the link there
  Bytes left;            // memory that this peer still lends
  bool is_out = false;   // gets nothing, because it has too little in one range
};

/// The bytes from `begin` on go to this peer.
struct PeerShare {
  std::size_t peer = 0;
  Bytes begin, bytes;
};

/// Returns shares that cover `bytes`, or none if all peers are out. Peers with the most left come first. A share is at
/// least 256 KiB if there are several: a smaller one is not worth the start of another copy.
std::vector<PeerShare> spread(Bytes bytes, const std::vector<PeerRoom>& peers);

}  // namespace noria
