// The way up: gradient buffers, what has arrived in them, and the drains that carry it home.
//
// Units: byte ranges inside a unit's gradient layout, which is the same on the device and in the home. Ownership: as
// the fetcher. Order: a buffer opens with a visit and is drained when the visit ends, so a unit whose gradients come in
// several visits is drained in several parts; only what arrived is copied. Threads: the caller serialises.
#pragma once

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "engine/custodian.h"
#include "engine/issuer.h"
#include "engine/unit.h"
#include "store/leases.h"

namespace noria {

class Drainer {
 public:
  Drainer(Issuer& issuer, Leases& leases, const std::vector<EngineUnit>& units, Place device, Custodian& custodian)
      : issuer_(issuer),
        leases_(leases),
        units_(units),
        device_(device),
        custodian_(custodian) {}

  /// Leases a gradient buffer; returns what the compute op that fills it accesses.
  std::vector<Access> open(UnitId unit, Bytes offset);
  bool is_open(UnitId unit) const { return open_.contains(unit); }

  /// Bytes [offset, offset + bytes) of the unit's gradient have been written on the compute stream.
  void arrived(UnitId unit, Bytes offset, Bytes bytes);

  /// Queues the drain of every open buffer and gives the buffers back; returns what was drained of which unit. The
  /// compute ticket must have been given.
  std::vector<std::pair<UnitId, Bytes>> drain_open();
  /// Gives the buffers back without draining them: what arrived is lost (the pass raised).
  void abandon();

  /// Units drained since the last call, each once.
  std::vector<UnitId> take_landed();

  Bytes drained() const { return drained_; }

 private:
  struct Open {
    Bytes offset;
    BufferId buffer;
    std::map<Bytes, Bytes> arrived;  // offset -> end, disjoint, merged
  };
  void close(UnitId unit, const Open& open);

  Issuer& issuer_;
  Leases& leases_;
  const std::vector<EngineUnit>& units_;
  const Place device_;
  Custodian& custodian_;
  std::map<UnitId, Open> open_;
  std::set<UnitId> landed_;
  Bytes drained_;
};

}  // namespace noria
