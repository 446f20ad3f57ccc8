// Fetcher brings units to the device, from home or from a peer that keeps them. It knows which units lie on the device,
// and at which version.
//
// Ownership: borrows what the constructor takes. Order: ops are issued in the order of the calls.
// Threads: the caller serialises; nothing here blocks.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "engine/collector.h"
#include "engine/file_weights.h"
#include "engine/issuer.h"
#include "engine/peer_copies.h"
#include "engine/unit_table.h"
#include "store/leases.h"

namespace noria {

class Fetcher {
 public:
  /// `collector` null: the home has whole units. `files` null: all weights lie in host memory.
  Fetcher(Issuer& issuer, Leases& leases, const UnitTable& units, Place device, Collector* collector,
          FileWeights* files, PeerCopies& copies)
      : issuer_(issuer),
        leases_(leases),
        units_(units),
        device_(device),
        collector_(collector),
        files_(files),
        copies_(copies),
        times_fetched_(units.size(), 0) {}

  /// Leases the range that the planned op names, and queues the copy of the home's newest version into it. If ranks
  /// share the home, it copies this rank's shard and then gathers the other ranks' shards. If a peer has that version,
  /// it comes from there.
  void fetch(UnitId unit, Bytes offset);
  /// A visit of the unit has begun. If peers are to keep the unit and do not have this version yet, queues a copy
  /// there.
  void stash(UnitId unit);
  /// Gives the lease back. Never waits: the op that writes the range next waits for its readers.
  void evict(UnitId unit);
  /// No copy of the unit on the device or at peers is used again.
  void mark_stale(UnitId unit);
  /// Evicts units that are older than the home.
  void evict_stale();
  void evict_all();

  bool is_current(UnitId unit) const;
  /// Returns the units that lie on the device at the home's version, by unit.
  std::vector<Resident> residents() const;
  std::byte* address(UnitId unit) const;
  /// Returns what a compute op reads when it needs this unit.
  Access access(UnitId unit) const;

  std::int64_t num_fetches() const { return num_fetches_; }
  const UnitMap<std::int64_t>& times_fetched() const { return times_fetched_; }
  Bytes fetched() const { return fetched_; }  // from home

 private:
  struct Held {
    Bytes offset;
    BufferId buffer;
    Version version;
  };
  const Held& held(UnitId unit) const;
  Bytes fetch_shards(const EngineUnit& source, const Held& into, UnitId unit);
  std::optional<FileWeights::Brought> bring(UnitId unit, Op& fetch);
  static void add_copies(std::vector<CopySpan>& copies, std::byte* to, const HomePart& part, const EngineUnit& source,
                         const std::optional<FileWeights::Brought>& brought);

  Issuer& issuer_;
  Leases& leases_;
  const UnitTable& units_;
  const Place device_;
  Collector* const collector_;
  FileWeights* const files_;
  PeerCopies& copies_;
  std::map<UnitId, Held> resident_;
  std::int64_t num_fetches_ = 0;
  UnitMap<std::int64_t> times_fetched_;
  Bytes fetched_;
};

}  // namespace noria
