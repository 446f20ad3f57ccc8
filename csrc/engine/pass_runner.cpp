#include "engine/pass_runner.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace noria {
namespace {

Verb verb_of(Phase phase) { return phase == Phase::forward ? Verb::forward : Verb::backward; }

}  // namespace

PassTotals PassRunner::totals() const {
  return {owners_.fetcher.num_fetches(), owners_.compute.stalled_us(), owners_.fetcher.fetched(),
          owners_.drainer.brought(),     owners_.drainer.drained(),    owners_.drainer.reduced()};
}

// ---- a pass begins ------------------------------------------------------------------------------------------------

void PassRunner::begin(const Signature& signature) {
  pass_.phase = signature.phase;
  const auto expected = pass_.book.begin(signature);
  begin_phase(signature, expected);
  const bool adopt = prepared_ && expected && prepared_->following.itinerary == expected &&
                     prepared_->residents == owners_.fetcher.residents();
  const PassTotals now = totals();
  if (adopt) {
    following_ = prepared_->following;
    count_ = prepared_->count;
    const PassTotals prepared = std::exchange(count_.first, now);
    count_.first.fetches = prepared.fetches;  // what `step` has fetched counts
    count_.first.fetched = prepared.fetched;
    prepared_.reset();
  } else {
    drop_prepared();
    count_ = {now, std::nullopt, 0};
    following_ = {};
    if (expected) {
      following_.itinerary = expected;
      following_.plan = plans_.plan_from(*expected, 0);
    }
  }
  if (following_.plan) count_.planned = following_.plan->num_fetches;
  play_until(-1);
}

void PassRunner::begin_phase(const Signature& signature, std::optional<ItineraryId> expected) {
  if (owners_.activations != nullptr) owners_.activations->begin_pass(signature.phase, signature.grad_enabled);
  if (parts_.collector != nullptr) parts_.collector->turn(signature.phase);
  const bool is_backward = signature.phase == Phase::backward;
  if (owners_.backward != nullptr) {
    owners_.backward->begin_pass(is_backward || signature.grad_enabled);
    if (is_backward) owners_.backward->begin_backward(expected);
  }
  if (is_backward) owners_.drafts.begin_backward(pass_, expected, !owners_.drainer.is_unsynced());
}

// ---- visits -------------------------------------------------------------------------------------------------------

void PassRunner::announce(HookId hook, const std::vector<UnitId>& needs, Phase phase, Stream stream, bool recomputes) {
  NORIA_INVARIANT(pass_.phase.has_value(), "a visit was announced outside of a pass");
  BackwardUpdates* const backward = owners_.backward;
  const OpenVisit* const before = owners_.compute.visit();
  const bool goes_on = needs.empty() ? before != nullptr && before->visit.hook == hook  // a visit of units at rest
                                     : owners_.compute.is_visited(needs);
  if (goes_on) {
    if (recomputes) return;
    OpenVisit& open = *owners_.compute.visit();
    const bool is_use = backward != nullptr && hook != open.visit.hook && backward->count_use(needs);
    if (!is_use) open.is_recomputed = false;
    return;
  }
  close_visit(stream, Visiting::ends);
  for (UnitId unit : needs) {
    if (backward != nullptr) backward->refuse_updated(unit, "it is needed once more");
  }
  follow(Visit{hook, phase, needs, {}});
  play_until(pass_.book.position() - following_.base);
  enter_visit(stream);
  owners_.compute.visit()->is_recomputed = recomputes;
}

void PassRunner::follow(const Visit& visit) {
  const auto itinerary = pass_.book.announce(visit);
  const std::int64_t position = pass_.book.position();
  const bool as_planned = following_.plan && itinerary && following_.itinerary == itinerary &&
                          position - following_.base < static_cast<std::int64_t>(following_.plan->visits.size());
  if (as_planned) return;
  forget_plan();
  following_.base = position;
  count_.planned.reset();
  if (itinerary) {
    following_.itinerary = itinerary;
    following_.plan = plans_.plan_from(*itinerary, position);
    return;
  }
  ++count_.unplanned_visits;
  following_.plan = plans_.plan({visit}, {}, /*adds=*/false);
}

void PassRunner::play_until(std::int64_t visit_index) {
  if (!following_.plan) return;
  const std::shared_ptr<const PassPlan> plan = following_.plan;
  bool is_issued = visit_index < 0;
  update_before(*plan, visit_index);
  while (following_.next_op < plan->ops.size()) {
    const Op& op = plan->ops[following_.next_op];
    if (op.visit > visit_index) break;
    // A drafted unit is hardly used before the step. So it is not fetched ahead: perhaps another pass has begun than
    // was expected.
    if (is_issued && op.verb == Verb::fetch && owners_.drafts.is_drafted(op.unit)) break;
    ++following_.next_op;
    switch (op.verb) {
    case Verb::evict:
      owners_.fetcher.evict(op.unit);
      break;
    case Verb::fetch:
      fetch(op);
      break;
    case Verb::forward:
    case Verb::backward:
      issue_visit(plan->visits[static_cast<std::size_t>(op.visit)], op);
      is_issued = op.visit == visit_index;
      break;
    default:
      break;  // drains were issued when their visit ended
    }
  }
}

// Runs updates on the device before the visit is issued: ops of the compute lane end in the order of their issue.
void PassRunner::update_before(const PassPlan& plan, std::int64_t visit_index) {
  for (std::size_t i = following_.next_op; i < plan.ops.size() && plan.ops[i].visit <= visit_index; ++i) {
    if (plan.ops[i].verb == Verb::fetch) owners_.updates.run_streamed(plan.ops[i].unit);
  }
}

void PassRunner::fetch(const Op& planned) {
  const Buffer into = parts_.buffers[planned.accesses.back().buffer];
  if (into.purpose == Purpose::gradient_buffer) {
    if (parts_.units[into.unit].held == nullptr) return;  // only its visit takes a slot of the gradient ring
    make_ready_to_add(into.unit);
    owners_.drainer.bring(into.unit, into.offset);
    return;
  }
  owners_.updates.run_deferred(planned.unit);
  owners_.drafts.drop_draft(planned.unit);  // this pass needs the weights of before
  owners_.fetcher.fetch(planned.unit, into.offset);
}

void PassRunner::make_ready_to_add(UnitId unit) {
  // If no fetch of the unit has run this update, it still reads what is held.
  owners_.updates.run_deferred(unit);
  owners_.drafts.drop_draft(unit);  // an undo needs the gradients of before
  if (owners_.backward != nullptr && !owners_.drainer.is_unsynced()) owners_.backward->hold(unit);
}

void PassRunner::issue_visit(const Visit& visit, const Op& planned) {
  OpenVisit open;
  open.visit = visit;
  open.op.lane = Lane::compute;
  open.op.verb = verb_of(visit.phase);
  open.op.unit = planned.unit;
  for (UnitId unit : visit.needs) open.op.accesses.push_back(owners_.fetcher.access(unit));
  for (const Access& access : planned.accesses) {
    const Buffer buffer = parts_.buffers[access.buffer];
    if (buffer.purpose != Purpose::gradient_buffer) continue;
    make_ready_to_add(buffer.unit);
    for (const Access& made : owners_.drainer.open(buffer.unit, buffer.offset)) open.op.accesses.push_back(made);
  }
  if (owners_.activations != nullptr) {
    const Stream stream = owners_.compute.stream();
    for (const Access& read : owners_.activations->enter(visit.hook, visit.phase, planned.unit, stream)) {
      open.op.accesses.push_back(read);
    }
    owners_.compute.add_stall(owners_.activations->take_waited_us());
  }
  owners_.compute.issue(std::move(open));
}

void PassRunner::enter_visit(Stream stream) {
  try {
    owners_.compute.enter(stream);
  } catch (...) {
    parts_.issuer.note_told(std::current_exception());
    throw;
  }
  const OpenVisit& open = *owners_.compute.visit();
  if (owners_.activations != nullptr) owners_.activations->opened(open.opened_us);
  for (UnitId unit : open.visit.needs) {
    attached_.push_back(unit);  // first: what is half attached is evicted, too
    parts_.callbacks.attach(unit, owners_.fetcher.address(unit));
    owners_.fetcher.stash(unit);
  }
}

void PassRunner::close_visit(Stream stream, Visiting visiting) {
  if (owners_.compute.visit() == nullptr) return;
  evict_attached();
  const OpenVisit open = owners_.compute.end(stream);
  drain();
  if (visiting == Visiting::goes_on) return;
  if (owners_.activations != nullptr) owners_.activations->leave(open.op.unit, stream);
  if (owners_.backward != nullptr) owners_.backward->end_visit(open.visit, open.is_recomputed);
}

void PassRunner::drain() {
  const std::vector<std::pair<UnitId, Bytes>> drained = owners_.drainer.drain_open();
  if (owners_.backward != nullptr) owners_.backward->note_drained(drained);
  owners_.drafts.note_drained(pass_.book.position(), drained);
}

// Before the visit's ticket is given: the callbacks may still launch reads of the weights.
void PassRunner::evict_attached() {
  while (!attached_.empty()) {
    const UnitId unit = attached_.back();
    attached_.pop_back();
    bool is_as_before = false;
    try {
      is_as_before = parts_.callbacks.evict(unit);
    } catch (...) {
      owners_.fetcher.mark_stale(unit);
      throw;
    }
    if (!is_as_before) owners_.fetcher.mark_stale(unit);
  }
}

// ---- gradients ----------------------------------------------------------------------------------------------------

void PassRunner::expect_gradient(UnitId unit, Stream stream) {
  if (pass_.book.position() < 0) {
    throw UsageError("a backward through what the wrapped model has computed",
                     "a gradient of unit \"" + parts_.units[unit].facts.name +
                         "\" before any of its modules was passed",
                     "call the wrapped model: a graph from before noria.wrap is not followed");
  }
  pass_.book.note_gradient(unit);
  if (owners_.backward != nullptr) owners_.backward->refuse_updated(unit, "a gradient of it came");
  if (!owners_.drainer.is_open(unit)) {
    NORIA_INVARIANT(owners_.compute.visit() != nullptr, "a gradient arrived outside of a visit");
    // The plan has no buffer for this gradient. So the visit goes on as a new op that has one.
    const Visit visit = owners_.compute.visit()->visit;
    const bool is_recomputed = owners_.compute.visit()->is_recomputed;
    close_visit(stream, Visiting::goes_on);
    plan_gradient(unit, visit);
    play_until(0);
    enter_visit(stream);
    owners_.compute.visit()->is_recomputed = is_recomputed;
  }
  owners_.compute.go_on(stream, owners_.drainer.take_up(unit));
}

// Plans the rest of the pass again, from a visit on that brings a gradient of this unit.
void PassRunner::plan_gradient(UnitId unit, Visit visit) {
  visit.gradients = {unit};
  const std::int64_t position = pass_.book.position();
  std::vector<Visit> rest = {std::move(visit)};
  std::vector<Visit> next;
  bool adds = false;
  if (following_.itinerary) {
    adds = pass_.book.signature(*following_.itinerary).accumulating;
    const auto& known = pass_.book.visits(*following_.itinerary);
    const auto done = std::min(position + 1, static_cast<std::int64_t>(known.size()));
    rest.insert(rest.end(), known.begin() + done, known.end());
    next = plans_.visits_after(*following_.itinerary);
  }
  owners_.drainer.give_back_brought();
  following_.plan = plans_.plan(std::move(rest), std::move(next), adds);
  following_.base = position;
  following_.next_op = 0;
  count_.planned.reset();
}

void PassRunner::reduce_rest(Stream stream) {
  owners_.drainer.set_reduces_rest(true);
  for (UnitId unit : owners_.drainer.left_unreduced()) {
    Visit visit;
    visit.phase = Phase::backward;
    visit.gradients = {unit};
    forget_plan();
    following_.plan = plans_.plan({visit}, {}, /*adds=*/false);
    play_until(0);
    enter_visit(stream);
    close_visit(stream, Visiting::ends);
  }
  owners_.drainer.set_reduces_rest(false);
}

// ---- a pass ends --------------------------------------------------------------------------------------------------

std::vector<UnitId> PassRunner::end(Stream stream) {
  close_visit(stream, Visiting::ends);
  const Phase phase = *pass_.phase;
  if (phase == Phase::backward) reduce_rest(stream);
  pass_.phase.reset();
  const ItineraryId itinerary = pass_.book.end();
  forget_old_passes();
  if (following_.itinerary != itinerary) count_.planned.reset();  // it ended before the plan did
  forget_plan();
  owners_.stats.end_pass(pass_.book, itinerary, totals() - count_.first, count_.planned, count_.unplanned_visits);
  if (phase == Phase::forward) {
    pass_.last_forward = itinerary;
    const bool may_train = pass_.book.signature(itinerary).grad_enabled;
    if (owners_.backward != nullptr && may_train) owners_.backward->end_forward(itinerary);
    return {};
  }
  owners_.drafts.end_backward(itinerary);
  // Landing: from here on the user's loop may read and edit what is held.
  const std::vector<UnitId> landed = owners_.drainer.take_landed();
  if (owners_.backward != nullptr) {
    try {
      owners_.backward->update_rest(/*what_accumulates=*/false);
    } catch (...) {  // the pass has ended already, so `reset` does not abandon it
      owners_.backward->abandon();
      throw;
    }
  }
  land(landed, stream);
  return landed;
}

void PassRunner::forget_old_passes() {
  for (ItineraryId forgotten : pass_.book.take_forgotten()) {
    owners_.drafts.forget(forgotten);
    owners_.stats.forget(forgotten);
  }
}

void PassRunner::land(const std::vector<UnitId>& units, Stream stream) {
  if (!parts_.options.shows_gradients()) return;
  Op op;
  op.verb = Verb::user;
  for (UnitId unit : units) {
    const BufferId held = parts_.units[unit].facts.held;
    // If a gradient is being read early, the user's loop may read it too. The loop says so before it writes.
    if (owners_.drafts.is_read(unit)) op.accesses.push_back({held, parts_.issuer.version(held), Access::Mode::read});
    else op.accesses.push_back({held, parts_.issuer.next_version(held), Access::Mode::write});
  }
  owners_.compute.pass(std::move(op), stream);
}

void PassRunner::reset(Stream stream) {
  if (!pass_.phase) return;
  evict_attached();
  owners_.compute.abandon(stream);
  owners_.drainer.abandon();
  const bool was_backward = pass_.is(Phase::backward);
  if (parts_.options.lane) parts_.options.lane->forget_taken();
  if (parts_.collector != nullptr && was_backward && !owners_.drainer.is_unsynced()) parts_.collector->note_broken();
  owners_.drafts.drop_all();
  const std::vector<UnitId> landed = owners_.drainer.take_landed();
  pass_.book.abandon();
  forget_plan();
  drop_prepared();
  pass_.phase.reset();
  if (owners_.backward != nullptr && was_backward) owners_.backward->abandon();
  land(landed, stream);  // the user may read and edit what came before the error
}

// ---- the next forward ---------------------------------------------------------------------------------------------

void PassRunner::prepare_next_forward() {
  drop_prepared();
  const auto next = pass_.book.expected_after_update();
  if (!next) return;
  count_ = {totals(), std::nullopt, 0};
  following_ = {};
  following_.itinerary = next;
  following_.plan = plans_.plan_from(*next, 0);
  play_until(-1);
  const std::int64_t fetches = owners_.fetcher.num_fetches() - count_.first.fetches;
  prepared_ = {std::exchange(following_, {}), count_, owners_.fetcher.residents(), fetches};
}

void PassRunner::forget_plan() {
  owners_.drainer.give_back_brought();
  following_ = {};
}

void PassRunner::evict_all() {
  NORIA_INVARIANT(!pass_.phase, "the window is emptied inside of a pass");
  drop_prepared();
  following_ = {};
  owners_.fetcher.evict_all();
}

void PassRunner::drop_prepared() {
  if (!prepared_) return;
  unclaimed_fetches_ += prepared_->num_fetches;
  prepared_.reset();
}

std::vector<UnitId> PassRunner::next_forward_order() const {
  std::vector<UnitId> order;
  UnitMap<bool> seen(parts_.units.size());
  const auto add = [&](UnitId unit) {
    if (!std::exchange(seen[unit], true)) order.push_back(unit);
  };
  if (const auto next = pass_.book.expected_after_update()) {
    for (const Visit& visit : pass_.book.visits(*next)) {
      for (UnitId unit : visit.needs) add(unit);
    }
  }
  for (UnitId unit : parts_.units.ids()) add(unit);
  return order;
}

}  // namespace noria
