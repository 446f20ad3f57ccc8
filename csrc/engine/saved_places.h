// Where what blocks save goes when it leaves the device: to peers, as long as they have room, or to the home.
//
// Units, order, threads: as of peer_places.h. Ownership: the memory is the caller's; more of the home's comes from the
// custodian.
#pragma once

#include "engine/custodian.h"
#include "engine/peer_places.h"

namespace noria {

inline bool is_at_peers(const Stretches& stretches) { return stretches.front().peer.has_value(); }

class SavedPlaces {
 public:
  SavedPlaces(BufferTable& buffers, Custodian& custodian)
      : buffers_(buffers),
        custodian_(custodian),
        peers_(buffers, Purpose::saved_copy) {}

  void add_peer(const PeerMemory& peer) { peers_.add_peer(peer); }
  bool shrink_peer(std::int32_t rank, Bytes left) { return peers_.shrink_peer(rank, left); }

  /// All at peers, or whole at home. `of_home`: there also where peers have room. Throws UsageError where neither has
  /// as much.
  Stretches take(Bytes bytes, bool of_home);
  void give_back(const Stretches& stretches);

  Bytes at_home() const { return home_.taken(); }

 private:
  BufferTable& buffers_;
  Custodian& custodian_;
  PeerPlaces peers_;
  RangePool home_;
};

}  // namespace noria
