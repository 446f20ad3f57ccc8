#include "plan/planner.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/errors.h"
#include "plan/placement.h"

namespace noria {
namespace {

Bytes room_for(const Visit& visit, const UnitMap<UnitFacts>& units) {
  Bytes room;
  for (UnitId unit : visit.needs) room += align_up(units[unit].weights, kTensorAlignment);
  for (UnitId unit : visit.gradients) room += align_up(units[unit].gradients, kTensorAlignment);
  return room;
}

// Returns text such as: unit "head" needs 3.0 MiB (weights 2.0 MiB, gradients 1.0 MiB)
std::string describe(const Visit& visit, const UnitMap<UnitFacts>& units) {
  std::set<UnitId> involved(visit.needs.begin(), visit.needs.end());
  involved.insert(visit.gradients.begin(), visit.gradients.end());
  std::string text = involved.size() == 1 ? "unit " : "units ";
  for (UnitId unit : involved) text += "\"" + units[unit].name + "\", ";
  Bytes weights;
  Bytes gradients;
  for (UnitId unit : visit.needs) weights += units[unit].weights;
  for (UnitId unit : visit.gradients) gradients += units[unit].gradients;
  text.resize(text.size() - 2);
  return text + (involved.size() == 1 ? " needs " : " need ") + to_string(room_for(visit, units)) + " (weights " +
         to_string(weights) + ", gradients " + to_string(gradients) + ")";
}

void refuse_what_does_not_fit(const PlanRequest& request, const UnitMap<UnitFacts>& units) {
  const Budget smallest = smallest_budget(request.visits, units);
  const Budget& budget = request.budget;
  const auto largest = [&](auto size_of) {
    return *std::max_element(request.visits.begin(), request.visits.end(),
                             [&](const Visit& a, const Visit& b) { return size_of(a) < size_of(b); });
  };
  if (smallest.arena > budget.arena) {
    const Visit visit = largest([&](const Visit& each) { return room_for(each, units); });
    throw UsageError("device memory for what one visit needs at once: " + describe(visit, units),
                     "room for " + to_string(budget.arena) + " (" + std::to_string(budget.arena.count) + " bytes)",
                     "raise device_memory until there is room for " + to_string(smallest.arena) + " (" +
                         std::to_string(smallest.arena.count) + " bytes), or split the unit");
  }
  if (budget.window > 0 && smallest.window > budget.window) {
    const Visit visit = largest([](const Visit& each) { return each.needs.size(); });
    throw UsageError("a window of " + std::to_string(smallest.window) +
                         " units, which one visit uses together: " + describe(visit, units),
                     "window=" + std::to_string(budget.window),
                     "raise window to at least " + std::to_string(smallest.window));
  }
}

// Puts stays into issue order. Every fetch comes as early as its memory and the window allow, in the order of need.
class Writer {
 public:
  Writer(const PlanRequest& request, const UnitMap<UnitFacts>& units, BufferTable& buffers)
      : request_(request),
        units_(units),
        buffers_(buffers),
        stays_(place(request, units)) {
    plan_.visits = request.visits;
    for (std::size_t i = 0; i < stays_.size(); ++i) {
      const Stay& stay = stays_[i];
      const Purpose purpose = stay.is_weights ? Purpose::weights : Purpose::gradient_buffer;
      leased_.push_back(buffers.intern({request.device, stay.offset, stay.bytes, Format::compute, purpose, stay.unit}));
      if (!stay.is_weights) buffers_of_visit_[stay.first_visit].push_back(i);
      else if (stay.first_visit < 0) lease(i, -1);
      else fetches_.push_back(i);
    }
  }

  PassPlan run() {
    const auto num_visits = static_cast<std::int64_t>(plan_.visits.size());
    prefetch(-1);
    for (std::int64_t visit = 0; visit < num_visits; ++visit) {
      drain(visit - 1, visit);
      while (next_ < fetches_.size() && stays_[fetches_[next_]].first_visit == visit) {
        NORIA_INVARIANT(fetch_next(visit), "what a visit needs cannot be fetched before it");
      }
      fetch_held(visit, visit);
      compute(visit);
      fetch_held(visit + 1, visit);
      prefetch(visit);
    }
    drain(num_visits - 1, num_visits);
    for (const auto& [unit, stay] : lying_) plan_.exit.push_back({unit, stays_[stay].offset});
    return std::move(plan_);
  }

 private:
  Op& add(Verb verb, Lane lane, UnitId unit, std::int64_t opening) {
    Op op;
    op.id = OpId(static_cast<std::int64_t>(plan_.ops.size()));
    op.lane = lane;
    op.verb = verb;
    op.unit = unit;
    op.visit = static_cast<std::int32_t>(opening);
    plan_.ops.push_back(std::move(op));
    return plan_.ops.back();
  }
  std::int64_t last_op() const { return static_cast<std::int64_t>(plan_.ops.size()) - 1; }

  void lease(std::size_t index, std::int64_t first_op) {
    const Stay& stay = stays_[index];
    lease_of_[index] = plan_.leases.size();
    plan_.leases.push_back({leased_[index], request_.device, stay.offset, stay.bytes, first_op, -1});
    plan_.peak = std::max(plan_.peak, stay.offset + stay.bytes);
    if (!stay.is_weights) return;
    lying_[stay.unit] = index;
    plan_.peak_units = std::max(plan_.peak_units, static_cast<std::int32_t>(lying_.size()));
  }

  void evict(std::size_t index, std::int64_t opening) {
    const UnitId unit = stays_[index].unit;
    NORIA_INVARIANT(stays_[index].free_at <= opening && lying_.erase(unit) == 1,
                    "unit " + units_[unit].name + " is evicted while a visit still needs it");
    add(Verb::evict, Lane::compute, unit, opening).accesses = {{leased_[index], 0, Access::Mode::read}};
    plan_.leases[lease_of_[index]].last_op = last_op();
  }

  std::vector<std::size_t> in_the_way_of(const Stay& stay) const {
    std::vector<std::size_t> found;
    for (const auto& [unit, index] : lying_) {
      const Stay& other = stays_[index];
      const bool overlaps = other.offset < stay.offset + stay.bytes && stay.offset < other.offset + other.bytes;
      if (overlaps || (stay.is_weights && unit == stay.unit)) found.push_back(index);
    }
    return found;
  }

  // Issues the next fetch in the order of need, after the evictions that it asks for. Returns false if this opening is
  // too early.
  bool fetch_next(std::int64_t opening) {
    const std::size_t index = fetches_[next_];
    const Stay& stay = stays_[index];
    if (stay.ready_at > opening) return false;
    std::vector<std::size_t> victims = in_the_way_of(stay);
    if (request_.budget.window > 0) {
      const auto cap = static_cast<std::size_t>(request_.budget.window);
      for (auto it = lying_.begin(); it != lying_.end() && lying_.size() - victims.size() >= cap; ++it) {
        const Stay& other = stays_[it->second];
        const bool given_up = other.given_up_at <= static_cast<std::int64_t>(next_) && other.free_at <= opening;
        if (given_up && std::find(victims.begin(), victims.end(), it->second) == victims.end()) {
          victims.push_back(it->second);
        }
      }
      if (lying_.size() - victims.size() >= cap) return false;
    }
    for (std::size_t victim : victims) evict(victim, opening);

    const UnitFacts& facts = units_[stay.unit];
    Op& op = add(Verb::fetch, Lane::fetch, stay.unit, opening);
    op.bytes = stay.bytes;
    op.accesses = {{facts.working, 0, Access::Mode::read}, {leased_[index], 0, Access::Mode::write}};
    lease(index, last_op());
    ++plan_.num_fetches;
    plan_.fetched += stay.bytes;
    ++next_;
    return true;
  }

  void prefetch(std::int64_t opening) {
    while (next_ < fetches_.size() && fetch_next(opening)) {
    }
  }

  // Fetches what a visit's gradients are added to, where that has not been done yet and is not too early.
  void fetch_held(std::int64_t visit, std::int64_t opening) {
    if (!request_.adds) return;
    for (std::size_t index : buffers_of_visit_[visit]) {
      const Stay& stay = stays_[index];
      const bool is_early = stay.ready_at > opening || (visit > opening && is_filled_at(stay.unit, opening));
      if (is_early || lease_of_.contains(index)) continue;
      make_room(index, opening);
      const BufferId held = units_[stay.unit].held;
      Op& op = add(Verb::fetch, Lane::fetch, stay.unit, opening);
      op.bytes = stay.bytes;
      op.accesses = {{held, versions_[held], Access::Mode::read},
                     {leased_[index], ++versions_[leased_[index]], Access::Mode::write}};
      lease(index, last_op());
    }
  }

  // Returns true if gradients of the unit come in this visit: they have not been drained when it opens.
  bool is_filled_at(UnitId unit, std::int64_t visit) const {
    const auto& units = plan_.visits[static_cast<std::size_t>(visit)].gradients;
    return std::find(units.begin(), units.end(), unit) != units.end();
  }

  void make_room(std::size_t index, std::int64_t opening) {
    for (std::size_t victim : in_the_way_of(stays_[index])) evict(victim, opening);
  }

  void compute(std::int64_t opening) {
    const Visit& visit = plan_.visits[static_cast<std::size_t>(opening)];
    const auto& opened = buffers_of_visit_[opening];
    for (std::size_t index : opened) {
      if (!request_.adds) make_room(index, opening);
    }
    const Verb verb = visit.phase == Phase::forward ? Verb::forward : Verb::backward;
    Op& op = add(verb, Lane::compute, visit.needs.empty() ? UnitId() : visit.needs.back(), opening);
    for (UnitId unit : visit.needs) op.accesses.push_back({leased_[lying_.at(unit)], 0, Access::Mode::read});
    for (std::size_t index : opened) {
      const BufferId held = units_[stays_[index].unit].held;
      op.accesses.push_back({held, versions_[held], Access::Mode::read});  // what accumulation adds to
      op.accesses.push_back({leased_[index], ++versions_[leased_[index]], Access::Mode::write});
      if (!request_.adds) lease(index, last_op());
    }
  }

  void drain(std::int64_t visit, std::int64_t opening) {
    for (std::size_t index : buffers_of_visit_[visit]) {
      const Stay& stay = stays_[index];
      const BufferId held = units_[stay.unit].held;
      Op& op = add(Verb::drain, Lane::drain, stay.unit, opening);
      op.bytes = stay.bytes;
      op.accesses = {{leased_[index], versions_[leased_[index]], Access::Mode::read},
                     {held, ++versions_[held], Access::Mode::write}};
      plan_.leases[lease_of_[index]].last_op = last_op();
    }
  }

  const PlanRequest& request_;
  const UnitMap<UnitFacts>& units_;
  BufferTable& buffers_;
  const std::vector<Stay> stays_;
  PassPlan plan_;
  std::vector<BufferId> leased_;                                       // by stay: the range as a buffer
  std::map<std::size_t, std::size_t> lease_of_;                        // by stay: its lease in the plan
  std::map<std::int64_t, std::vector<std::size_t>> buffers_of_visit_;  // gradient buffers, by visit
  std::vector<std::size_t> fetches_;                                   // stays to be fetched, in the order of need
  std::size_t next_ = 0;                                               // index into fetches_
  std::map<UnitId, std::size_t> lying_;                                // units leased now, and their stays
  std::map<BufferId, Version> versions_;                               // by buffer: how often this pass writes it
};

}  // namespace

Budget smallest_budget(const std::vector<Visit>& visits, const UnitMap<UnitFacts>& units) {
  Budget smallest;
  for (const Visit& visit : visits) {
    smallest.arena = std::max(smallest.arena, room_for(visit, units));
    smallest.window = std::max(smallest.window, static_cast<std::int32_t>(visit.needs.size()));
  }
  return smallest;
}

PassPlan plan_pass(const PlanRequest& request, const UnitMap<UnitFacts>& units, BufferTable& buffers) {
  refuse_what_does_not_fit(request, units);
  return Writer(request, units, buffers).run();
}

}  // namespace noria
