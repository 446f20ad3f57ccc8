// StepStats counts passes and steps, for the report.
//
// Ownership: borrows what it asks. Threads: the caller serialises.
//
// Note [Hidden updates]. The time of an update counts as behind a pass while the compute lane is at one of the pass's
// visits. It counts as exposed while that lane waits, for any reason, and outside of passes: in `step`, and in what the
// loop does between passes. The lane's own clock tells what the lane does (device/cuda_times.h). On a device, what the
// lane has done last is known a little later.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "device/update_time.h"
#include "engine/activation_store.h"
#include "engine/drainer.h"
#include "engine/options.h"
#include "engine/updates.h"
#include "plan/itinerary.h"

namespace noria {

/// Counts what one kind of pass did, for the report.
struct PassStats {
  ItineraryId itinerary;
  Signature signature;
  std::int64_t num_visits = 0;
  std::int64_t times = 0;
  std::optional<std::int64_t> planned_fetches;  // of the last occurrence; none: it had no plan, or left it
  std::int64_t fetches = 0;                     // of the last occurrence
  std::int64_t unplanned_visits = 0;            // of all occurrences
};

/// Holds totals of all passes, or of one.
struct PassTotals {
  std::int64_t fetches = 0;
  std::int64_t stalled_us = 0;
  Bytes fetched, brought, drained, reduced;
};
PassTotals operator-(PassTotals after, const PassTotals& before);

/// Sums over the `num_steps` steps that ended after the first one. Until the first one has ended: over all so far.
struct StepSums {
  std::int64_t num_steps = 0;
  std::int64_t wall_us = 0;
  std::int64_t forward_us = 0, backward_us = 0;  // inside visits, by the clock of the compute lane
  std::int64_t forward_stall_us = 0, backward_stall_us = 0;
  Bytes forward_fetched, backward_fetched, drained, reduced;  // reduced: received from other ranks, to be reduced
  Bytes copied;                                               // between home and device, both ways, all kinds
  Bytes updated;                                              // read and written by the pool
  std::int64_t forward_fetch_us = 0, backward_fetch_us = 0, drain_us = 0, offload_us = 0, peer_us = 0;
  std::int64_t forward_drain_us = 0;  // from updates on the device; drain_us has the others
  std::int64_t forward_collect_us = 0, backward_collect_us = 0;
  std::int64_t device_update_us = 0;  // of updates on the device, which the compute lane runs between visits
  std::int64_t update_us = 0;         // of others: the sum of the next three; see Note [Hidden updates]
  std::int64_t update_behind_forward_us = 0, update_behind_backward_us = 0, update_exposed_us = 0;
};

class StepStats {
 public:
  StepStats(EngineParts parts, const Updates& updates, const Drainer& drainer, const ActivationStore* activations,
            std::shared_ptr<UpdateTime> update_time)
      : parts_(parts),
        updates_(updates),
        drainer_(drainer),
        activations_(activations),
        update_time_(std::move(update_time)) {}

  /// `pass`: the totals of this pass. `planned`: its fetches by the plan that it followed to the end; none: it did not.
  void end_pass(const ItineraryBook& book, ItineraryId itinerary, const PassTotals& pass,
                std::optional<std::int64_t> planned, std::int64_t unplanned_visits);
  void forget(ItineraryId itinerary);
  void end_step();

  std::vector<PassStats> passes() const;
  /// Returns the number of passes whose kinds have been forgotten, because they did not come again for long.
  std::int64_t num_forgotten_passes() const { return forgotten_passes_; }
  StepSums sums() const;
  /// Returns the time inside visits since the engine was made.
  std::int64_t compute_us() const;

 private:
  struct FirstStep {  // values at its end
    StepSums sums;
    SavedStats saved;
    Bytes drained;
    std::int64_t update_us = 0;
    Bytes updated, come, gone;
  };
  SavedStats saved() const { return activations_ != nullptr ? activations_->stats() : SavedStats{}; }
  void add_lane_times(StepSums& sums, const FirstStep& first) const;

  const EngineParts parts_;
  const Updates& updates_;
  const Drainer& drainer_;
  const ActivationStore* const activations_;  // null: what forwards save stays
  const std::shared_ptr<UpdateTime> update_time_;
  std::map<ItineraryId, PassStats> passes_;
  std::int64_t forgotten_passes_ = 0;
  StepSums sums_;
  std::optional<FirstStep> first_step_;
  std::int64_t last_step_us_ = 0;
};

}  // namespace noria
