// PassPlans asks the planner for the plan of a pass, from what lies on the device now, and keeps plans of passes that
// come again.
//
// Ownership: borrows the engine's parts, the fetcher and the book. Threads: the caller serialises.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "engine/fetcher.h"
#include "engine/options.h"
#include "engine/pass_state.h"

namespace noria {

class PassPlans {
 public:
  PassPlans(EngineParts parts, const ItineraryBook& book, Fetcher& fetcher)
      : parts_(parts),
        book_(book),
        fetcher_(fetcher) {}

  /// Evicts stale units, and plans these visits from what lies on the device then. `next`: visits expected after them.
  /// Gradients for which a visit has no room are left out: each is planned when it comes.
  /// `adds`: what gradients are added to is fetched ahead. Else a visit fetches it itself.
  std::shared_ptr<const PassPlan> plan(std::vector<Visit> visits, std::vector<Visit> next, bool adds);
  /// Does the same for this itinerary's visits from `position` on.
  std::shared_ptr<const PassPlan> plan_from(ItineraryId itinerary, std::int64_t position);
  /// The budget has changed: all passes are planned anew.
  void forget() { plans_.clear(); }
  /// Returns the visits expected after this itinerary. Units whose device copies will be stale by then are left out.
  std::vector<Visit> visits_after(ItineraryId itinerary) const;

 private:
  // Holds all that a plan depends on beyond the units: itinerary, position in it, successor, whether an update comes
  // before that, residents.
  using Key = std::tuple<ItineraryId, std::int64_t, ItineraryId, bool, std::vector<Resident>>;

  const EngineParts parts_;
  const ItineraryBook& book_;
  Fetcher& fetcher_;
  std::map<Key, std::shared_ptr<const PassPlan>> plans_;
};

}  // namespace noria
