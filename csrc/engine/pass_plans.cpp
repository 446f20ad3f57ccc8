#include "engine/pass_plans.h"

#include <algorithm>
#include <utility>

namespace noria {
namespace {

constexpr std::size_t kMostPlans = 512;

}  // namespace

std::shared_ptr<const PassPlan> PassPlans::plan(std::vector<Visit> visits, std::vector<Visit> next, bool adds) {
  const EngineOptions& options = parts_.options;
  const UnitMap<UnitFacts>& facts = parts_.units.facts();
  fetcher_.evict_stale();
  // The book keeps all gradients of a visit together, but gradients without a plan came one after the other. So they
  // may not fit at once.
  for (Visit& visit : visits) {
    while (visit.gradients.size() > 1 && smallest_budget({visit}, facts).arena > options.budget.arena) {
      visit.gradients.pop_back();
    }
  }
  return std::make_shared<const PassPlan>(
      plan_pass({options.device, options.budget, std::move(visits), std::move(next), fetcher_.residents(), adds}, facts,
                parts_.buffers));
}

std::shared_ptr<const PassPlan> PassPlans::plan_from(ItineraryId itinerary, std::int64_t position) {
  fetcher_.evict_stale();
  const auto successor = book_.successor(itinerary);
  Key key{itinerary, position, successor ? successor->itinerary : ItineraryId(), successor && successor->after_update,
          fetcher_.residents()};
  if (plans_.size() > kMostPlans) plans_.clear();  // a loop that never repeats itself must not fill memory
  auto& known = plans_[key];
  if (!known) {
    const auto& visits = book_.visits(itinerary);
    const bool adds = book_.signature(itinerary).accumulating;
    known = plan({visits.begin() + position, visits.end()}, visits_after(itinerary), adds);
  }
  return known;
}

std::vector<Visit> PassPlans::visits_after(ItineraryId itinerary) const {
  const auto successor = book_.successor(itinerary);
  if (!successor) {
    // Nothing has followed it yet. Usually the mirror image of a forward that autograd records follows it.
    const auto& signature = book_.signature(itinerary);
    if (signature.phase != Phase::forward || !signature.grad_enabled) return {};
    std::vector<Visit> mirrored = book_.visits(itinerary);
    std::reverse(mirrored.begin(), mirrored.end());
    return mirrored;
  }
  std::vector<Visit> visits = book_.visits(successor->itinerary);
  if (!successor->after_update) return visits;
  for (Visit& visit : visits) {  // after an update only frozen units still equal what the home holds
    std::erase_if(visit.needs, [&](UnitId unit) { return parts_.units[unit].facts.gradients > Bytes{0}; });
  }
  return visits;
}

}  // namespace noria
