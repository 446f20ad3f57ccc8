// SavedPlaces gives places to saved tensors that leave the device: at peers while they have room, else at home.
//
// Units, order, threads: as in peer_places.h. Ownership: the memory is the caller's, who gives more of the home's if
// asked.
#pragma once

#include <functional>
#include <utility>

#include "engine/peer_places.h"

namespace noria {

inline bool is_at_peers(const Extents& extents) { return extents.front().peer.has_value(); }

/// As EngineCallbacks::more_home. It may call the engine.
using MoreHome = std::function<std::pair<std::byte*, Bytes>(Bytes least)>;

class SavedPlaces {
 public:
  SavedPlaces(BufferTable& buffers, MoreHome more_home)
      : buffers_(buffers),
        more_home_(std::move(more_home)),
        peers_(buffers, Purpose::saved_copy) {}

  void add_peer(const PeerMemory& peer) { peers_.add_peer(peer); }
  bool shrink_peer(std::int32_t rank, Bytes left) { return peers_.shrink_peer(rank, left); }

  /// Returns places at peers, or one place at home. `of_home`: at home even if peers have room. Throws UsageError if
  /// there is none.
  Extents take(Bytes bytes, bool of_home);
  void give_back(const Extents& extents);

  Bytes at_home() const { return home_.taken(); }

 private:
  BufferTable& buffers_;
  const MoreHome more_home_;
  PeerPlaces peers_;
  RangePool home_;
};

}  // namespace noria
