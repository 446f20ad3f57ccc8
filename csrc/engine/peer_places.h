// PeerPlaces gives out ranges of the memory that peers lend. It copies nothing.
//
// Units: bytes. Ownership: the memory is the caller's. Order: a range may be given back before its last reader has
// passed. The op that writes it next waits for that reader, as for any read. Threads: the caller serialises.
//
// Note [Extents]. What goes to peers is cut into one extent for each peer that has room for it (plan/spread.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "plan/plan.h"
#include "store/range_pool.h"

namespace noria {

/// Describes memory of a peer that this process may use as it likes, and the link there.
struct PeerMemory {
  std::int32_t rank = 0;  // of the peer
  int link = 0;           // copies over different links go side by side
  double bandwidth = 1;   // of the link, relative to the other links
  std::byte* memory = nullptr;
  Bytes bytes;
  Bytes begin = {};  // offset in all that this peer lends
};

/// Describes a part of something that leaves the device, and where it goes.
struct Extent {
  Bytes begin, bytes;  // within the storage that leaves
  std::byte* memory = nullptr;
  BufferId copy;
  int link = 0;
  std::optional<std::size_t> peer;  // by the order of `add_peer`; none: the home
  RangePool::Range range;
};
using Extents = std::vector<Extent>;

class PeerPlaces {
 public:
  /// `purpose`: of the buffers there.
  PeerPlaces(BufferTable& buffers, Purpose purpose) : buffers_(buffers), purpose_(purpose) {}

  /// Call once for each peer.
  void add_peer(const PeerMemory& peer);
  /// From now on uses nothing of this peer beyond `left` bytes. Returns false if something beyond is still in use.
  bool shrink_peer(std::int32_t rank, Bytes left);

  /// Returns extents of `bytes` in all, or none if peers lack free ranges for them.
  Extents take(Bytes bytes);
  void give_back(const Extents& extents);

 private:
  struct Lent {
    PeerMemory peer;
    RangePool pool;
  };

  /// Returns false if the peer has too little in one range.
  bool add_extent(std::size_t peer, Bytes begin, Bytes bytes, Extents& extents);

  BufferTable& buffers_;
  const Purpose purpose_;
  std::vector<Lent> peers_;
};

}  // namespace noria
