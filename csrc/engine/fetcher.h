// The way down: which units lie on the device, at which version, and the fetches that bring them there.
//
// Ownership: borrows issuer, leases and units from the engine. Order: ops are issued in the order of the
// calls. Threads: the caller serialises; nothing here blocks.
#pragma once

#include <map>
#include <vector>

#include "engine/collector.h"
#include "engine/issuer.h"
#include "engine/unit.h"
#include "store/leases.h"

namespace noria {

class Fetcher {
 public:
  /// `collector` null: the home has whole units.
  Fetcher(Issuer& issuer, Leases& leases, const std::vector<EngineUnit>& units, Place device, Collector* collector)
      : issuer_(issuer),
        leases_(leases),
        units_(units),
        device_(device),
        collector_(collector) {}

  /// Leases the range that the planned op names and queues the copy of the home's newest version into it; of a shard,
  /// and then the other ranks'.
  void fetch(UnitId unit, Bytes offset);
  /// The lease may be reused. Never waits: whoever writes the range next waits for its readers.
  void evict(UnitId unit);
  void mark_stale(UnitId unit);
  /// Evicts what is older than the home.
  void evict_stale();

  bool is_current(UnitId unit) const;
  /// The units that lie on the device at the home's version, by unit.
  std::vector<Resident> residents() const;
  std::byte* address(UnitId unit) const;
  /// What a compute op reads when it needs this unit.
  Access access(UnitId unit) const;

  std::int64_t num_fetches() const { return num_fetches_; }
  Bytes fetched() const { return fetched_; }

 private:
  struct Held {
    Bytes offset;
    BufferId buffer;
    Version version;
  };
  const Held& held(UnitId unit) const;
  Bytes fetch_shards(const EngineUnit& source, const Held& into, UnitId unit);

  Issuer& issuer_;
  Leases& leases_;
  const std::vector<EngineUnit>& units_;
  const Place device_;
  Collector* const collector_;
  std::map<UnitId, Held> resident_;
  std::int64_t num_fetches_ = 0;
  Bytes fetched_;
};

}  // namespace noria
