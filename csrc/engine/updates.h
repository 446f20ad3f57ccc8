// Updates makes the op of each update, and runs deferred updates: on the launching thread (kernel="torch"), or on the
// device (StreamedUpdates). It also tells whether weights and state are torn.
//
// Ownership: borrows the engine's parts.
// Order: on the pool an update is issued at `step`, and the fetch that needs it waits for it. On the launching thread
// it is issued when another op needs what it reads or writes: `run_deferred`. Either way the unit's version rises at
// `step`, so no device copy of it counts as current. An update inside backward raises it there.
// Threads: the caller serialises. `run_deferred` and `clear_torn` block.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/trace.h"
#include "base/unit_map.h"
#include "device/update_time.h"
#include "engine/options.h"
#include "engine/streamed_updates.h"

namespace noria {

class Updates {
 public:
  /// `run` updates a unit on the calling thread, or a piece of it on the device.
  Updates(EngineParts parts, ComputeLane& compute, std::shared_ptr<UpdateTime> time, std::function<void(UnitId)> run)
      : parts_(parts),
        time_(std::move(time)),
        run_(run),
        streamed_(parts, compute, std::move(run)),
        deferred_(parts.units.size()),
        has_scales_(parts.units.size()),
        kept_(parts.units.size()) {}

  /// Makes the op of the unit's update. The state gets its next version; the working copy has it already.
  /// `reads_scales`: it multiplies the gradients by late scales, if they have any.
  /// If its state lies in a file, issues first what brings it. Call `note_issued` when the op is on its way.
  Op op_of(UnitId unit, bool reads_scales = true);
  void note_issued(UnitId unit);
  /// The unit's gradients are multiplied by late scales from now on. Returns the access that writes these scales.
  Access write_scales(UnitId unit);

  void defer(UnitId unit);
  bool is_any_deferred() const;
  /// See Engine::run_deferred.
  void run_deferred(UnitId unit);
  /// Does the same if the update runs on the device. Call it before a visit is issued that needs the unit.
  void run_streamed(UnitId unit);
  StreamedUpdates& streamed() { return streamed_; }
  const StreamedUpdates& streamed() const { return streamed_; }

  // ---- torn: weights and state of a unit do not belong together ----
  /// `step` has kept a draft. If its ticket fails, the unit is torn.
  void note_kept(UnitId unit, Ticket draft) { kept_[unit] = std::move(draft); }
  /// See Engine::mark_torn. The first reason is kept.
  void mark_torn(const std::string& why);
  /// See Engine::torn.
  std::string torn() const;
  /// Throws MachineError if a unit is torn.
  void refuse_torn() const;
  /// All weights and all state have been loaded.
  void clear_torn();

  std::int64_t busy_us() const;
  LaneStats stats() const;  // of the launching thread and of the pool
  void set_trace(std::shared_ptr<Trace> trace) { trace_ = std::move(trace); }

 private:
  std::string broke_off(const std::string& what, UnitId unit, const std::string& why) const;
  void await_inputs(UnitId unit, const std::vector<Ticket>& waits);
  void note_ran(const Op& op, const std::vector<Ticket>& waits, std::int64_t asked_us, std::int64_t start_us);

  const EngineParts parts_;
  const std::shared_ptr<UpdateTime> time_;
  const std::function<void(UnitId)> run_;
  StreamedUpdates streamed_;
  UnitMap<bool> deferred_;
  UnitMap<bool> has_scales_;  // late scales have multiplied its gradients before
  UnitMap<Ticket> kept_;      // of the last draft that was kept
  std::string torn_;
  LaneStats launching_;  // updates on the launching thread
  std::shared_ptr<Trace> trace_;
};

}  // namespace noria
