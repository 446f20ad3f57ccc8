#include "engine/engine.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace noria {
namespace {

constexpr std::size_t kMostPlans = 512;

Verb verb_of(Phase phase) { return phase == Phase::forward ? Verb::forward : Verb::backward; }

bool contains_all(const std::vector<UnitId>& sorted, const std::vector<UnitId>& wanted) {
  return std::includes(sorted.begin(), sorted.end(), wanted.begin(), wanted.end());
}

std::vector<UnitFacts> facts_of(const std::vector<EngineUnit>& units) {
  std::vector<UnitFacts> facts;
  for (const EngineUnit& unit : units) facts.push_back(unit.facts);
  return facts;
}

}  // namespace

Engine::Engine(EngineOptions options, std::shared_ptr<Backend> backend, std::vector<EngineUnit> units,
               BufferTable buffers, EngineCallbacks& callbacks, std::shared_ptr<HostOptimizer> optimizer)
    : options_(std::move(options)),
      backend_(std::move(backend)),
      units_(std::move(units)),
      facts_(facts_of(units_)),
      buffers_(std::move(buffers)),
      callbacks_(callbacks),
      optimizer_(std::move(optimizer)),
      issuer_(*backend_, buffers_),
      leases_(backend_, options_.budget.arena),
      collector_(options_.lane ? std::make_optional<Collector>(issuer_, units_, options_.lane, options_.scratch,
                                                               /*takes_sums=*/!options_.ring)
                               : std::nullopt),
      copies_(issuer_),
      fetcher_(issuer_, leases_, units_, options_.device, collector_ ? &*collector_ : nullptr, copies_),
      drainer_(issuer_, leases_, units_, options_.device, callbacks_, collector_ ? &*collector_ : nullptr,
               options_.ring.has_value()),
      pending_(units_.size(), false),
      has_scales_(units_.size(), false),
      early_(units_.size()),
      moved_(units_.size(), false),
      committed_(units_.size()) {
  backend_->set_update_time(update_time_);
  if (optimizer_) optimizer_->set_update_time(update_time_);
  if (options_.saves) saver_.emplace(issuer_, *backend_, callbacks_, options_.saved_room);
  if (!options_.ring) return;
  in_backward_.emplace();
  in_backward_->ring = options_.ring;
  in_backward_->expected.resize(units_.size());
  in_backward_->arriving.resize(units_.size());
  in_backward_->come.resize(units_.size());
  in_backward_->slot.resize(units_.size());
  in_backward_->last_visit.resize(units_.size());
  in_backward_->visits_made.resize(units_.size());
  in_backward_->visits_left.resize(units_.size());
  in_backward_->is_updated.resize(units_.size());
  in_backward_->sums.resize(units_.size());
}

Engine::~Engine() {
  try {  // before the leases are freed: a lane may be writing there
    if (optimizer_) optimizer_->close();
    if (options_.lane) options_.lane->close();
    backend_->close();
  } catch (...) {  // NOLINT(bugprone-empty-catch): a caller that wants to hear of it calls close()
  }
}

// ---- passes -----------------------------------------------------------------------------------------------------

void Engine::continue_on(Stream stream) {
  const auto before = std::exchange(stream_, stream);
  if (!before || *before == stream) return;
  const Ticket ticket = backend_->open({OpId(), Lane::compute, Verb::user, UnitId()});
  backend_->give(ticket, *before);
  backend_->wait({ticket}, stream, {OpId(), Lane::compute, Verb::user, UnitId()});
}

void Engine::begin_pass(const Signature& signature, Stream stream) {
  const std::lock_guard lock(mutex_);
  continue_on(stream);
  if (phase_) {
    // A backward that is still open has raised. A forward that is still open has simply come to its end.
    if (*phase_ == Phase::backward) reset_unlocked(stream);
    else end_pass_unlocked(stream);
  }
  issuer_.sweep();
  refuse_torn();
  if (signature.accumulating && shows_gradients()) note_edits(Stage::backward, stream);
  expect(signature);
  play_until(-1);
}

void Engine::expect(const Signature& signature) {
  phase_ = signature.phase;
  if (saver_) saver_->begin_pass(*phase_, signature.grad_enabled);
  if (collector_) collector_->turn(signature.phase);
  if (in_backward_) in_backward_->is_counted = signature.phase == Phase::backward || signature.grad_enabled;
  const auto expected = book_.begin(signature);
  if (signature.phase == Phase::backward) {
    if (in_backward_) begin_updating(expected);
    begin_early_work(expected);
  }
  const bool adopt =
      prepared_ && expected && prepared_->itinerary == expected && prepared_residents_ == fetcher_.residents();
  if (adopt) {
    following_ = *prepared_;
    count_ = prepared_count_;
  } else {
    drop_prepared();
    count_ = {};
    count_.first_fetch = fetcher_.num_fetches();
    count_.first_fetched = fetcher_.fetched();
    following_ = {};
    if (expected) {
      following_.itinerary = expected;
      following_.plan = plan_from(*expected, 0);
    }
  }
  prepared_.reset();
  count_.drained_before = drainer_.drained();
  count_.brought_before = drainer_.brought();
  count_.reduced_before = drainer_.reduced();
  if (following_.plan) count_.planned = following_.plan->num_fetches;
}

void Engine::announce(HookId hook, const std::vector<UnitId>& needs, Phase phase, Stream stream, bool recomputes) {
  const std::lock_guard lock(mutex_);
  NORIA_INVARIANT(phase_.has_value(), "a visit was announced outside of a pass");
  continue_on(stream);
  if (visit_ && contains_all(visit_->visit.needs, needs)) {
    if (recomputes) return;
    if (in_backward_ && in_backward_->is_counted && hook != visit_->visit.hook) count_use(needs);
    else visit_->is_recomputed = false;
    return;
  }
  close_visit(stream);
  for (UnitId unit : needs) refuse_updated(unit, "it is needed once more");
  follow(Visit{hook, phase, needs, {}});
  play_until(book_.position() - following_.base);
  enter_visit(stream);
  visit_->is_recomputed = recomputes;
}

void Engine::leave(Stream stream) {
  const std::lock_guard lock(mutex_);
  continue_on(stream);
  close_visit(stream);
}

void Engine::follow(const Visit& visit) {
  const auto itinerary = book_.announce(visit);
  const std::int64_t position = book_.position();
  const bool as_planned = following_.plan && itinerary && following_.itinerary == itinerary &&
                          position - following_.base < static_cast<std::int64_t>(following_.plan->visits.size());
  if (as_planned) return;
  following_ = {};
  following_.base = position;
  count_.planned.reset();
  if (itinerary) {
    following_.itinerary = itinerary;
    following_.plan = plan_from(*itinerary, position);
    return;
  }
  ++count_.unplanned_visits;
  following_.plan = std::make_shared<const PassPlan>(plan({visit}, {}));
}

PassPlan Engine::plan(std::vector<Visit> visits, std::vector<Visit> next) {
  fetcher_.evict_stale();
  // Gradients that were not foreseen come one after the other, and are then remembered together. If a visit has no room
  // for all at once, the rest is left to come unforeseen again.
  for (Visit& visit : visits) {
    while (visit.gradients.size() > 1 && smallest_budget({visit}, facts_).arena > options_.budget.arena) {
      visit.gradients.pop_back();
    }
  }
  return plan_pass({options_.device, options_.budget, std::move(visits), std::move(next), fetcher_.residents()}, facts_,
                   buffers_);
}

std::shared_ptr<const PassPlan> Engine::plan_from(ItineraryId itinerary, std::int64_t position) {
  fetcher_.evict_stale();
  const auto successor = book_.successor(itinerary);
  PlanKey key{itinerary, position, successor ? successor->itinerary : ItineraryId(),
              successor && successor->after_update, fetcher_.residents()};
  if (plans_.size() > kMostPlans) plans_.clear();  // a loop that never repeats itself must not fill memory
  auto& known = plans_[key];
  if (!known) {
    const auto& visits = book_.visits(itinerary);
    known = std::make_shared<const PassPlan>(plan({visits.begin() + position, visits.end()}, visits_after(itinerary)));
  }
  return known;
}

std::vector<Visit> Engine::visits_after(ItineraryId itinerary) const {
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
    std::erase_if(visit.needs,
                  [&](UnitId unit) { return units_[static_cast<std::size_t>(unit.value)].facts.gradients > Bytes{0}; });
  }
  return visits;
}

void Engine::play_until(std::int64_t visit_index) {
  if (!following_.plan) return;
  const std::shared_ptr<const PassPlan> plan = following_.plan;
  while (following_.next_op < plan->ops.size()) {
    const Op& op = plan->ops[following_.next_op];
    if (op.visit > visit_index) break;
    ++following_.next_op;
    switch (op.verb) {
    case Verb::evict:
      fetcher_.evict(op.unit);
      break;
    case Verb::fetch:
      settle(op.unit);
      fetcher_.fetch(op.unit, buffers_[op.accesses.back().buffer].offset);
      break;
    case Verb::forward:
    case Verb::backward:
      issue_visit(plan->visits[static_cast<std::size_t>(op.visit)], op);
      break;
    default:
      break;  // drains were issued when their visit ended
    }
  }
}

void Engine::issue_visit(const Visit& visit, const Op& planned) {
  OpenVisit open;
  open.visit = visit;
  open.op.lane = Lane::compute;
  open.op.verb = verb_of(visit.phase);
  open.op.unit = planned.unit;
  for (UnitId unit : visit.needs) open.op.accesses.push_back(fetcher_.access(unit));
  for (const Access& access : planned.accesses) {
    const Buffer buffer = buffers_[access.buffer];
    if (buffer.purpose != Purpose::gradient_buffer) continue;
    settle(buffer.unit);  // runs an update that still has to read what is held, if no fetch of the unit has run it
    if (!drainer_.is_unsynced()) hold(buffer.unit);
    for (const Access& made : drainer_.open(buffer.unit, buffer.offset)) open.op.accesses.push_back(made);
  }
  if (saver_) {
    for (const Access& read : saver_->enter(visit.hook, visit.phase, planned.unit, *stream_)) {
      open.op.accesses.push_back(read);
    }
    count_.stall_us += saver_->take_waited_us();
  }
  begin_op(open);
  visit_ = std::move(open);
}

void Engine::begin_op(OpenVisit& open) {
  auto begun = issuer_.begin(open.op);
  open.ticket = backend_->open(begun.label);
  issuer_.keep(open.op.id, open.ticket);
  open.waits = std::move(begun.waits);
}

void Engine::await_in_visit(Stream stream) {
  OpenVisit& open = *visit_;
  const std::int64_t before = clock_us();
  for (const Ticket& ticket : open.waits) open.waited_on.push_back(ticket->label.op);
  backend_->wait(open.waits, stream, OpLabel{open.op.id, Lane::compute, open.op.verb, open.op.unit});
  open.waits.clear();
  count_.stall_us += clock_us() - before;
}

void Engine::enter_visit(Stream stream) {
  NORIA_INVARIANT(visit_.has_value(), "the plan has no compute op for this visit");
  await_in_visit(stream);
  OpenVisit& open = *visit_;
  open.opened_us = clock_us();
  if (saver_) saver_->opened(open.opened_us);
  for (UnitId unit : open.visit.needs) {
    callbacks_.attach(unit, fetcher_.address(unit));
    attached_.push_back(unit);
    fetcher_.stash(unit);
  }
}

void Engine::close_visit(Stream stream, Visiting visiting) {
  if (!visit_) return;
  OpenVisit open = std::move(*visit_);
  visit_.reset();
  backend_->give(open.ticket, stream);
  const std::int64_t now = clock_us();
  if (trace_ && open.opened_us != 0) {
    Span span;
    span.op = open.op.id;
    span.lane = Lane::compute;
    span.verb = open.op.verb;
    span.unit = open.op.unit;
    span.end_us = trace_->now_us();
    span.start_us = span.end_us - (now - open.opened_us);
    span.waits = open.waited_on;
    trace_->add(std::move(span));
  }
  for (UnitId unit : attached_) callbacks_.evict(unit);
  attached_.clear();
  drain_open();
  if (saver_ && visiting == Visiting::ends) saver_->leave(open.op.unit, stream);
  if (in_backward_ && visiting == Visiting::ends) update_complete(open.visit, open.is_recomputed);
}

void Engine::expect_gradient(UnitId unit, Stream stream) {
  const std::lock_guard lock(mutex_);
  continue_on(stream);
  if (book_.position() < 0) {
    throw UsageError("a backward through what the wrapped model has computed",
                     "a gradient of unit \"" + unit_of(unit).facts.name + "\" before any of its modules was passed",
                     "call the wrapped model: a graph from before noria.wrap is not followed");
  }
  book_.note_gradient(unit);
  refuse_updated(unit, "a gradient of it came");
  if (drainer_.is_open(unit)) {
    go_on(stream, drainer_.take_up(unit));
    return;
  }
  NORIA_INVARIANT(visit_.has_value(), "a gradient arrived outside of a visit");
  // Not foreseen: the visit goes on as a new op, which has a buffer for this unit too. The rest of the pass is planned
  // again from here.
  Visit visit = visit_->visit;
  visit.gradients = {unit};
  const bool is_recomputed = visit_->is_recomputed;
  close_visit(stream, Visiting::goes_on);
  const std::int64_t position = book_.position();
  std::vector<Visit> rest = {visit};
  std::vector<Visit> next;
  if (following_.itinerary) {
    const auto& known = book_.visits(*following_.itinerary);
    const auto done = std::min(position + 1, static_cast<std::int64_t>(known.size()));
    rest.insert(rest.end(), known.begin() + done, known.end());
    next = visits_after(*following_.itinerary);
  }
  following_.plan = std::make_shared<const PassPlan>(plan(std::move(rest), std::move(next)));
  following_.base = position;
  following_.next_op = 0;
  count_.planned.reset();
  play_until(0);
  enter_visit(stream);
  visit_->is_recomputed = is_recomputed;
  go_on(stream, drainer_.take_up(unit));
}

// Adds accesses to the open visit. Ops of one lane end in the order of their issue, so the visit's op ends here, and
// the visit goes on as another op.
void Engine::go_on(Stream stream, const std::vector<Access>& accesses) {
  if (accesses.empty()) return;
  backend_->give(visit_->ticket, stream);
  visit_->op.accesses.insert(visit_->op.accesses.end(), accesses.begin(), accesses.end());
  begin_op(*visit_);
  await_in_visit(stream);
}

bool Engine::is_brought(UnitId unit, Bytes offset, Bytes bytes) const {
  const std::lock_guard lock(mutex_);
  return drainer_.is_brought(unit, offset, bytes);
}

void Engine::gradient_arrived(UnitId unit, Bytes offset, Bytes bytes) {
  const std::lock_guard lock(mutex_);
  drainer_.arrived(unit, offset, bytes);
  if (in_backward_ && bytes > Bytes{0}) in_backward_->arriving[static_cast<std::size_t>(unit.value)].insert(offset);
}

std::vector<UnitId> Engine::end_pass(Stream stream) {
  const std::lock_guard lock(mutex_);
  if (!phase_) return {};
  continue_on(stream);
  return end_pass_unlocked(stream);
}

// Sums what only earlier passes have brought, as if a visit without modules had brought it.
void Engine::sum_rest(Stream stream) {
  drainer_.set_sums_rest(true);
  for (UnitId unit : drainer_.left_unsummed()) {
    Visit visit;
    visit.phase = Phase::backward;
    visit.gradients = {unit};
    following_ = {};
    following_.plan = std::make_shared<const PassPlan>(plan({visit}, {}));
    play_until(0);
    enter_visit(stream);
    close_visit(stream);
  }
  drainer_.set_sums_rest(false);
}

void Engine::end_sums(Stream stream) {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::backward) return;
  continue_on(stream);
  close_visit(stream);
  sum_rest(stream);
}

void Engine::hold_unsummed(const std::vector<std::byte*>& memory, Stream stream) {
  const std::lock_guard lock(mutex_);
  end_passes(stream);
  NORIA_INVARIANT(options_.lane && !holds_unsummed_ && !phase_ && memory.size() == units_.size(),
                  "memory for gradients that are not summed comes once, between passes");
  holds_unsummed_ = true;
  Bytes end;
  for (std::size_t i = 0; i < units_.size(); ++i) {
    EngineUnit& unit = units_[i];
    if (unit.facts.gradients == Bytes{0}) continue;
    const UnitId id(static_cast<std::int32_t>(i));
    unit.unsummed = memory[i];
    unit.unsummed_buffer = buffers_.intern({{Place::Kind::host, kUnsummedRegion},
                                            end,
                                            unit.facts.gradients,
                                            Format::travel,
                                            Purpose::unsummed_gradient,
                                            id});
    end += unit.facts.gradients;
    callbacks_.held_moved(id, unit.unsummed);
  }
}

void Engine::set_unsynced(bool unsynced) {
  const std::lock_guard lock(mutex_);
  NORIA_INVARIANT(!unsynced || holds_unsummed_, "there is no memory for gradients that are not summed");
  drainer_.set_unsynced(unsynced);
}

bool Engine::is_unsummed(UnitId unit, Bytes offset, Bytes bytes) const {
  const std::lock_guard lock(mutex_);
  return drainer_.is_unsummed(unit, offset, bytes);
}

bool Engine::is_summed(UnitId unit, Bytes offset, Bytes bytes) const {
  const std::lock_guard lock(mutex_);
  return drainer_.is_summed(unit, offset, bytes);
}

std::vector<UnitId> Engine::end_pass_unlocked(Stream stream) {
  close_visit(stream);
  if (phase_ == Phase::backward) sum_rest(stream);
  const Phase phase = *phase_;
  phase_.reset();
  const ItineraryId itinerary = book_.end();
  for (ItineraryId forgotten : book_.take_forgotten()) {
    is_last_.erase(forgotten);
    const auto row = passes_.find(forgotten);
    if (row == passes_.end()) continue;
    forgotten_passes_ += row->second.times;
    passes_.erase(row);
  }
  if (following_.itinerary != itinerary) count_.planned.reset();  // it ended before the plan did
  following_ = {};
  PassStats& stats = passes_[itinerary];
  stats.itinerary = itinerary;
  stats.signature = book_.signature(itinerary);
  stats.num_visits = static_cast<std::int64_t>(book_.visits(itinerary).size());
  ++stats.times;
  stats.planned_fetches = count_.planned;
  stats.fetches = fetcher_.num_fetches() - count_.first_fetch;
  stats.unplanned_visits += count_.unplanned_visits;
  const Bytes fetched = fetcher_.fetched() - count_.first_fetched;
  const Bytes brought = drainer_.brought() - count_.brought_before;
  if (phase == Phase::forward) {
    last_forward_ = itinerary;
    sums_.forward_stall_us += count_.stall_us;
    sums_.forward_fetched += fetched;
    if (in_backward_ && stats.signature.grad_enabled) note_visits(itinerary);
    return {};
  }
  sums_.backward_stall_us += count_.stall_us;
  sums_.backward_fetched += fetched + brought;
  sums_.drained += drainer_.drained() - count_.drained_before;
  sums_.reduced += drainer_.reduced() - count_.reduced_before;

  last_backward_ = itinerary;

  // Landing: from here on the user's loop may read and edit what is held.
  const std::vector<UnitId> landed = drainer_.take_landed();
  if (in_backward_) update_rest(/*what_accumulates=*/false);
  if (shows_gradients()) land(landed, stream);
  return landed;
}

void Engine::land(const std::vector<UnitId>& units, Stream stream) {
  Op op;
  op.verb = Verb::user;
  for (UnitId unit : units) {
    const BufferId held = units_[static_cast<std::size_t>(unit.value)].facts.held;
    // If a gradient is being read early, the user's loop may read it too. The loop says so before it writes.
    if (is_read_early(unit)) op.accesses.push_back({held, issuer_.version(held), Access::Mode::read});
    else op.accesses.push_back({held, issuer_.next_version(held), Access::Mode::write});
  }
  finish_user_op(std::move(op), stream);
}

void Engine::finish_user_op(Op op, Stream stream, const std::function<void()>& act) {
  NORIA_INVARIANT(!visit_, "an op of the user's inside of a visit");
  issuer_.pass(std::move(op), stream, act);
}

void Engine::reset(Stream stream) {
  const std::lock_guard lock(mutex_);
  continue_on(stream);
  reset_unlocked(stream);
}

void Engine::forget(UnitId unit) {
  const std::lock_guard lock(mutex_);
  fetcher_.mark_stale(unit);
}

void Engine::reset_unlocked(Stream stream) {
  if (!phase_) return;
  if (visit_) {
    backend_->give(visit_->ticket, stream);  // what was launched cannot be taken back
    visit_.reset();
  }
  for (UnitId unit : attached_) callbacks_.evict(unit);
  attached_.clear();
  drainer_.abandon();
  const bool was_backward = phase_ == Phase::backward;
  if (options_.lane) options_.lane->forget_taken();
  if (collector_ && was_backward && !drainer_.is_unsynced()) collector_->note_broken();
  drop_all_early();
  const std::vector<UnitId> landed = drainer_.take_landed();
  book_.abandon();
  following_ = {};
  drop_prepared();
  phase_.reset();
  if (in_backward_ && was_backward) abandon_updating();
  if (shows_gradients()) land(landed, stream);  // the user may read and edit what came before the error
}

std::optional<Phase> Engine::phase() const {
  const std::lock_guard lock(mutex_);
  return phase_;
}

bool Engine::is_visited(const std::vector<UnitId>& needs) const {
  const std::lock_guard lock(mutex_);
  return visit_ && contains_all(visit_->visit.needs, needs);
}

std::vector<std::int64_t> Engine::exchange(std::vector<std::int64_t> numbers, Meeting meeting) {
  Standing standing;
  {
    const std::lock_guard lock(mutex_);
    NORIA_INVARIANT(collector_.has_value(), "nobody shares this home");
    standing = collector_->standing();
  }
  CollectLane::Met met = options_.lane->exchange(std::move(numbers), meeting, standing);
  const std::lock_guard lock(mutex_);
  if (meeting == Meeting::backward) is_uneven_ = is_uneven_ || met.was_uneven;
  if (met.has_assisted) collector_->note_assisted();
  for (UnitId unit : met.taken) {
    collector_->note_taken(unit);
    drop_early(unit);  // more gradients came than were foreseen
  }
  return std::move(met.numbers);
}

void Engine::idle() {
  const std::lock_guard lock(mutex_);
  if (options_.lane) options_.lane->idle();
  backend_->idle();
  if (optimizer_) optimizer_->idle();
  issuer_.sweep();
}

void Engine::close() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(closed_, true)) return;
  try {
    reset_unlocked(nullptr);
  } catch (...) {  // NOLINT(bugprone-empty-catch): the caller has heard of it before; nothing runs after this
  }
  if (optimizer_) optimizer_->close();
  if (options_.lane) options_.lane->close();
  backend_->close();
}

// ---- what forwards save -----------------------------------------------------------------------------------------

void Engine::add_peer(const PeerMemory& peer) {
  const std::lock_guard lock(mutex_);
  saver_->add_peer(peer);
}

bool Engine::shrink_peer(std::int32_t rank, Bytes left) {
  const std::lock_guard lock(mutex_);
  return saver_->shrink_peer(rank, left);
}

void Engine::send_saved_home(std::set<HookId> hooks) {
  const std::lock_guard lock(mutex_);
  saver_->send_home(std::move(hooks));
}

void Engine::set_saved_room(Bytes room) {
  const std::lock_guard lock(mutex_);
  saver_->set_room(room);
}

SavedId Engine::save(const std::byte* memory, Bytes bytes) {
  const std::lock_guard lock(mutex_);
  return saver_->save(memory, bytes);
}

void Engine::share_saved(SavedId saved) {
  const std::lock_guard lock(mutex_);
  saver_->share(saved);
}

void Engine::await_saved(SavedId saved, Stream stream) {
  const std::lock_guard lock(mutex_);
  if (closed_) {
    throw UsageError("backward before noria.unwrap, or the end of the model",
                     "a backward that needs what has been moved to the home, which is gone", "call backward() first");
  }
  saver_->await(saved, stream);
  count_.stall_us += saver_->take_waited_us();
}

void Engine::forget_saved(const std::vector<SavedId>& saved) {
  const std::lock_guard lock(mutex_);
  for (SavedId each : saved) saver_->forget(each);
}

SavedStats Engine::saved_stats() const {
  const std::lock_guard lock(mutex_);
  return saver_ ? saver_->stats() : SavedStats{};
}

std::map<HookId, SavedByModule> Engine::saved_by_module() const {
  const std::lock_guard lock(mutex_);
  return saver_ ? saver_->by_module() : std::map<HookId, SavedByModule>{};
}

// ---- units at peers ---------------------------------------------------------------------------------------------

void Engine::add_copy_peer(const PeerMemory& peer) {
  const std::lock_guard lock(mutex_);
  copies_.add_peer(peer);
}

void Engine::shrink_copy_peer(std::int32_t rank, Bytes left) {
  const std::lock_guard lock(mutex_);
  copies_.shrink_peer(rank, left);
}

void Engine::keep_copies(const std::vector<UnitId>& units) {
  const std::lock_guard lock(mutex_);
  NORIA_INVARIANT(!options_.lane, "a unit that ranks gather is not fetched by one of them alone");
  std::vector<std::pair<UnitId, Bytes>> kept;
  for (UnitId unit : units) kept.emplace_back(unit, facts_[static_cast<std::size_t>(unit.value)].weights);
  copies_.keep(std::move(kept));
}

CopyStats Engine::copy_stats() const {
  const std::lock_guard lock(mutex_);
  return copies_.stats();
}

std::vector<std::int64_t> Engine::times_fetched() const {
  const std::lock_guard lock(mutex_);
  return fetcher_.times_fetched();
}

// ---- what happened ----------------------------------------------------------------------------------------------

std::vector<PassStats> Engine::passes() const {
  const std::lock_guard lock(mutex_);
  std::vector<PassStats> result;
  for (const auto& [id, stats] : passes_) result.push_back(stats);
  return result;
}

std::vector<UnitId> Engine::resident_units() const {
  const std::lock_guard lock(mutex_);
  std::vector<UnitId> units;
  for (const Resident& resident : fetcher_.residents()) units.push_back(resident.unit);
  return units;
}

std::size_t Engine::num_remembered() const {
  const std::lock_guard lock(mutex_);
  return issuer_.num_remembered();
}

std::vector<std::string> Engine::wait_kinds() const {
  const std::lock_guard lock(mutex_);
  return issuer_.wait_kinds();
}

void Engine::omit_wait(const std::string& kind) {
  const std::lock_guard lock(mutex_);
  issuer_.hazards().omit(kind);
}

void Engine::set_trace(std::shared_ptr<Trace> trace) {
  const std::lock_guard lock(mutex_);
  backend_->set_trace(trace);
  if (optimizer_) optimizer_->set_trace(trace);
  if (saver_) saver_->set_trace(trace);
  trace_ = std::move(trace);
}

}  // namespace noria
