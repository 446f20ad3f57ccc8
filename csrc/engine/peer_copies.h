// PeerCopies keeps units' working copies at peers. A unit is copied there once for each version, and then fetched from
// there.
//
// The caller chooses which units have a place there (plan/copies.h).
// Ownership: borrows the issuer from the engine. The memory that peers lend is the caller's.
// Order: ops are issued in the order of the calls. Threads: the caller serialises; only `shrink_peer` blocks.
//
// Note [Stashing]. A unit is copied from its lease at its first visit, while the visit reads it too. The copy waits for
// the unit's fetch no longer than the visit does. A unit that is fetched but not visited costs nothing. A copy is of
// one version. If the unit gets another version, in any way, no fetch reads the copy any more. The next visit then puts
// the new version in its place. The copy of a frozen unit stays valid.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "engine/issuer.h"
#include "engine/peer_places.h"

namespace noria {

struct CopyStats {
  std::int64_t num_units = 0;  // that have a place at peers now
  std::int64_t num_stashed = 0, num_fetched = 0;
  Bytes stashed, fetched;  // to peers, and from there
};

class PeerCopies {
 public:
  explicit PeerCopies(Issuer& issuer) : issuer_(issuer), places_(issuer.buffers(), Purpose::peer_copy) {}

  /// Each peer once.
  void add_peer(const PeerMemory& peer) { places_.add_peer(peer); }
  /// From now on uses nothing of this peer beyond `left` bytes. Forgets all copies; units that still find room are
  /// copied anew. Waits until all copies under way have passed, so do not call it inside of a pass.
  void shrink_peer(std::int32_t rank, Bytes left);
  /// From now on keeps these units at peers if there is room, and no others. Copies are made anew.
  void keep(std::vector<std::pair<UnitId, Bytes>> units);

  bool holds(UnitId unit, Version version) const;
  /// Returns true if the unit has a place there that does not contain this version.
  bool lacks(UnitId unit, Version version) const;
  /// Queues the copy to peers of a unit that lies in `from`, which `leased` reads.
  void stash(UnitId unit, const Access& leased, const std::byte* from);
  /// Queues the copy from peers of a unit into `to`, which `leased` writes.
  void fetch(UnitId unit, const Access& leased, std::byte* to);
  /// The copy of this unit is not what the home holds: it is not used again.
  void forget(UnitId unit);

  const CopyStats& stats() const { return stats_; }

 private:
  struct Copy {
    Extents extents;
    std::optional<Version> version;  // none: nothing of use
  };
  void place();
  void submit(Verb verb, UnitId unit, std::vector<Access> accesses, Transfer transfer);

  Issuer& issuer_;
  PeerPlaces places_;
  std::vector<std::pair<UnitId, Bytes>> kept_;  // in the order of choice
  std::map<UnitId, Copy> copies_;
  Ticket last_;  // the newest op here
  CopyStats stats_;
};

}  // namespace noria
