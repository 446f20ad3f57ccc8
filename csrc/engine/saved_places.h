// Where what blocks save goes when it leaves the device: to peers, or to the home; which ranges of them are whose.
//
// Bookkeeping alone: nothing is copied here. Units: bytes. Ownership: the memory is the caller's; more of the home's
// comes from the custodian. Order: a range may be given back before its last reader has passed: whoever writes it next
// waits for that one, as for any read. Threads: the caller serialises.
//
// Note [Places]. A storage goes to the peers that have room for it, cut into one stretch for each link, as long as the
// link is fast, so that all end together; else to the home, whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/custodian.h"
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

class SavedPlaces {
 public:
  /// A part of a storage, and where it goes.
  struct Stretch {
    Bytes begin, bytes;  // of the storage
    std::byte* memory = nullptr;
    BufferId copy;
    int link = 0;
    std::size_t store = 0;
    RangePool::Range range;
  };
  /// Of one storage: all at peers, or a single one at home.
  using Stretches = std::vector<Stretch>;

  /// `purpose`: of the buffers there.
  SavedPlaces(BufferTable& buffers, Custodian& custodian, Purpose purpose = Purpose::saved_copy)
      : buffers_(buffers),
        custodian_(custodian),
        purpose_(purpose),
        stores_(1) {}

  /// Each peer once.
  void add_peer(const PeerMemory& peer);
  /// From now on nothing of it is used beyond so many bytes. False: something is still.
  bool shrink_peer(std::int32_t rank, Bytes left);

  /// `of_home`: also where peers have room. Throws UsageError where neither peers nor the home have as much.
  Stretches take(Bytes bytes, bool of_home);
  /// Nothing where peers have not as much.
  Stretches take_of_peers(Bytes bytes);
  void give_back(const Stretches& stretches);

  bool is_at_peers(const Stretches& stretches) const { return stretches.front().store != kHome; }
  Bytes at_home() const { return stores_[kHome].pool.taken(); }

 private:
  static constexpr std::size_t kHome = 0;
  struct Store {
    RangePool pool;
    std::optional<PeerMemory> peer;  // none: the home
  };

  /// Nothing, and who has not enough in one range.
  std::optional<std::size_t> cut(Bytes bytes, const std::vector<std::size_t>& peers, Stretches& stretches);
  bool add_stretch(std::size_t store, Bytes begin, Bytes bytes, Stretches& stretches);

  BufferTable& buffers_;
  Custodian& custodian_;
  const Purpose purpose_;
  std::vector<Store> stores_;
};

}  // namespace noria
