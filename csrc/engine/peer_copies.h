// Units' working copies at peers: put there once of each version, and fetched from there from then on.
//
// Which units have a place there is the caller's choice (plan/copies.h). Ownership: borrows the issuer from the engine;
// what peers lend is the caller's. Order: as the fetcher's. Threads: the caller serialises; only `shrink_peer` blocks.
//
// Note [Stashing]. A unit is copied from its lease when it is visited first, while the visit reads it too. Where the
// host computes it has arrived then; elsewhere the lane of the peers stands behind its fetch for as long as compute
// does. What is fetched but not visited costs nothing. A copy is of one version. Once the unit has another one, by
// whatever way, nobody reads the copy any more, and the next visit puts the new version in its place; a frozen unit's
// copy stays what it is.
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
  /// From now on nothing of it is used beyond so many bytes. All copies are forgotten, and those units that still find
  /// room are put there anew. Waits until all of its copies have passed, so not inside of a pass.
  void shrink_peer(std::int32_t rank, Bytes left);
  /// From now on these units are kept at peers, as far as there is room, and no others. Copies are made anew.
  void keep(std::vector<std::pair<UnitId, Bytes>> units);

  bool holds(UnitId unit, Version version) const;
  /// It has a place there, in which this version is not.
  bool lacks(UnitId unit, Version version) const;
  /// Queues the copy of a unit that lies in `from`, which `leased` reads.
  void stash(UnitId unit, const Access& leased, const std::byte* from);
  /// Queues the copy of a unit that is held there into `to`, which `leased` writes.
  void fetch(UnitId unit, const Access& leased, std::byte* to);
  /// What lies there of this unit is not what the home holds.
  void forget(UnitId unit);

  const CopyStats& stats() const { return stats_; }

 private:
  struct Copy {
    Stretches stretches;
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
