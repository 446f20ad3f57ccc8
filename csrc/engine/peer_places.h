// Memory that peers lend: which ranges of it are whose.
//
// Bookkeeping alone: nothing is copied here. Units: bytes. Ownership: the memory is the caller's. Order: a range may be
// given back before its last reader has passed: whoever writes it next waits for that one, as for any read. Threads:
// the caller serialises.
//
// Note [Stretches]. What goes there goes to the peers that have room for it, cut into one stretch for each link, as
// long as the link is fast, so that all end together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "plan/plan.h"
#include "store/range_pool.h"

namespace noria {

/// Memory of a peer that this process may use as it likes, and the way there.
struct PeerMemory {
  std::int32_t rank = 0;  // of the peer
  int link = 0;           // copies over different links go side by side
  double bandwidth = 1;   // of the link, as compared with the others'
  std::byte* memory = nullptr;
  Bytes bytes;
  Bytes begin = {};  // in all that this peer lends
};

/// A part of something that leaves the device, and where it goes.
struct Stretch {
  Bytes begin, bytes;  // of that
  std::byte* memory = nullptr;
  BufferId copy;
  int link = 0;
  std::optional<std::size_t> peer;  // by the order of `add_peer`; none: the home
  RangePool::Range range;
};
using Stretches = std::vector<Stretch>;

class PeerPlaces {
 public:
  /// `purpose`: of the buffers there.
  PeerPlaces(BufferTable& buffers, Purpose purpose) : buffers_(buffers), purpose_(purpose) {}

  /// Each peer once.
  void add_peer(const PeerMemory& peer);
  /// From now on nothing of it is used beyond so many bytes. False: something is still.
  bool shrink_peer(std::int32_t rank, Bytes left);

  /// Nothing where peers have not as much.
  Stretches take(Bytes bytes);
  void give_back(const Stretches& stretches);

 private:
  struct Lent {
    PeerMemory peer;
    RangePool pool;
  };

  /// Nothing, and who has not enough in one range.
  std::optional<std::size_t> cut(Bytes bytes, const std::vector<std::size_t>& peers, Stretches& stretches);
  bool add_stretch(std::size_t peer, Bytes begin, Bytes bytes, Stretches& stretches);

  BufferTable& buffers_;
  const Purpose purpose_;
  std::vector<Lent> peers_;
};

}  // namespace noria
