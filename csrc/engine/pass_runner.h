// PassRunner follows the plan of the pass that is open. It plays the ops that the plan has for each visit. It tells
// the other owners when passes and visits begin and end.
//
// Ownership: borrows the engine's parts and owners.
// Order: ops are issued in the order of the calls.
// Threads: the caller serialises. A call may block until a fetch has arrived, or run a deferred update.
//
// Note [A visit]. `announce` first ends the visit before: its parameters point nowhere, its compute ticket is given,
// and the gradients that arrived are drained. Then the ops are issued that the plan has for the new visit. The stream
// waits for what the visit reads, and the parameters point at their units. If the open visit has all these units, no
// new visit begins. Sometimes the plan did not foresee a visit or a gradient (another branch, for example). Then the
// runner plans it on the spot from what lies on the device now, and learns it when the pass ends.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/activation_store.h"
#include "engine/backward_updates.h"
#include "engine/compute_lane.h"
#include "engine/drafts.h"
#include "engine/drainer.h"
#include "engine/fetcher.h"
#include "engine/pass_plans.h"
#include "engine/pass_state.h"
#include "engine/step_stats.h"
#include "engine/updates.h"

namespace noria {

/// Lists the owners that take part in a pass. The engine owns them.
struct PassOwners {
  ComputeLane& compute;
  Fetcher& fetcher;
  Drainer& drainer;
  ActivationStore* activations;  // null: what forwards save stays
  Updates& updates;
  Drafts& drafts;
  BackwardUpdates* backward;  // null: updates run after `step`, or as drafts
  StepStats& stats;
};

class PassRunner {
 public:
  PassRunner(EngineParts parts, PassState& pass, PassOwners owners)
      : parts_(parts),
        pass_(pass),
        owners_(owners),
        plans_(parts, pass.book, owners.fetcher) {}

  /// Begins a pass. No pass is open.
  void begin(const Signature& signature);
  /// Begins a visit, or goes on with the one that is open; see Engine::announce.
  void announce(HookId hook, const std::vector<UnitId>& needs, Phase phase, Stream stream, bool recomputes);
  /// Ends the visit, if one is open.
  void leave(Stream stream) { close_visit(stream, Visiting::ends); }
  /// A gradient of this unit is about to be written; see Engine::expect_gradient.
  void expect_gradient(UnitId unit, Stream stream);
  /// Sums what only earlier passes have brought, as if a visit without modules had brought it.
  void reduce_rest(Stream stream);
  /// Ends the pass; see Engine::end_pass.
  std::vector<UnitId> end(Stream stream);
  /// Ends the pass, if one is open, because it raised.
  void reset(Stream stream);

  /// Evicts all units, also those that `prepare_next_forward` has fetched. No pass is open.
  void evict_all();

  /// Plays the opening of the forward that is expected next.
  void prepare_next_forward();
  /// The home's weights have been written. The rest of an open pass is planned again.
  void forget_plan();
  /// The budget has changed. No pass is open.
  void forget_all_plans() {
    drop_prepared();
    plans_.forget();
  }
  /// See Engine::next_forward_order.
  std::vector<UnitId> next_forward_order() const;
  /// Returns the number of fetches made at `step` for a forward that did not come next. No pass counts them.
  std::int64_t num_unclaimed_fetches() const { return unclaimed_fetches_; }

 private:
  struct Following {                       // the plan that is being played
    std::optional<ItineraryId> itinerary;  // none: this visit only
    std::shared_ptr<const PassPlan> plan;
    std::int64_t base = 0;  // visit 0 of the plan is this visit of the pass
    std::size_t next_op = 0;
  };
  struct Count {
    PassTotals first;                     // when the pass began
    std::optional<std::int64_t> planned;  // fetches; none: the pass has no plan, or has left it
    std::int64_t unplanned_visits = 0;
  };
  struct Prepared {
    Following following;
    Count count;
    std::vector<Resident> residents;
    std::int64_t num_fetches = 0;
  };

  enum class Visiting : std::uint8_t { ends, goes_on };
  void begin_phase(const Signature& signature, std::optional<ItineraryId> expected);
  void follow(const Visit& visit);
  void play_until(std::int64_t visit_index);
  void update_before(const PassPlan& plan, std::int64_t visit_index);
  void fetch(const Op& planned);
  void issue_visit(const Visit& visit, const Op& planned);
  void make_ready_to_add(UnitId unit);
  void enter_visit(Stream stream);
  void plan_gradient(UnitId unit, Visit visit);
  void close_visit(Stream stream, Visiting visiting);
  void drain();
  void evict_attached();
  void forget_old_passes();
  void land(const std::vector<UnitId>& units, Stream stream);
  void drop_prepared();
  PassTotals totals() const;

  const EngineParts parts_;
  PassState& pass_;
  const PassOwners owners_;
  PassPlans plans_;
  Following following_;
  Count count_;
  std::optional<Prepared> prepared_;  // the next forward's opening was played at `step`
  std::vector<UnitId> attached_;
  std::int64_t unclaimed_fetches_ = 0;
};

}  // namespace noria
