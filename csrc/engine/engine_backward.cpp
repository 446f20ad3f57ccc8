// Updates units inside of backward, as a part of the engine; see engine.h, Note [Inside backward].
#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "engine/engine.h"

namespace noria {
namespace {

constexpr const char* kRemedy = "wrap with update=\"auto\", which holds every gradient until step()";

}  // namespace

void Engine::expect_in_backward(UnitId unit, ExpectedUpdate update) {
  const std::lock_guard lock(mutex_);
  NORIA_INVARIANT(in_backward_ && update.job.in_place(), "an update inside backward is in place, and has a ring");
  NORIA_INVARIANT(update.job.pieces.size() == update.gradients.size(), "each piece is of one gradient");
  in_backward_->expected[static_cast<std::size_t>(unit.value)] = std::move(update);
}

void Engine::set_accumulating(bool accumulating) {
  const std::lock_guard lock(mutex_);
  NORIA_INVARIANT(in_backward_ && (!accumulating || !in_backward_->ring), "the gradient ring cannot accumulate");
  in_backward_->accumulating = accumulating;
}

bool Engine::holds_all() const {
  const std::lock_guard lock(mutex_);
  return !in_backward_ || !in_backward_->ring;
}

void Engine::hold_all(const std::vector<std::byte*>& held, Stream stream) {
  const std::lock_guard lock(mutex_);
  end_passes(stream);
  NORIA_INVARIANT(in_backward_ && in_backward_->ring && !phase_ && held.size() == units_.size(),
                  "memory for all gradients comes once, between passes");
  in_backward_->ring.reset();
  Bytes end;
  for (std::size_t i = 0; i < units_.size(); ++i) {
    EngineUnit& unit = units_[i];
    if (unit.facts.gradients == Bytes{0}) continue;
    const UnitId id(static_cast<std::int32_t>(i));
    unit.held = held[i];
    const Bytes bytes = held_bytes(id);
    unit.facts.held = facts_[i].held =
        buffers_.intern({{Place::Kind::host, kHeldRegion}, end, bytes, Format::travel, Purpose::held_gradient, id});
    end += bytes;
    if (!options_.lane) callbacks_.held_moved(id, unit.held);
  }
}

bool Engine::is_held_back(UnitId unit, Bytes offset) const {
  const std::lock_guard lock(mutex_);
  return in_backward_ && (in_backward_->come[static_cast<std::size_t>(unit.value)].contains(offset) ||
                          drainer_.is_unsummed(unit, offset, Bytes{1}));
}

void Engine::drop_gradient(UnitId unit, Bytes offset, Bytes bytes) {
  const std::lock_guard lock(mutex_);
  drainer_.forget(unit, offset, bytes);
  if (in_backward_) in_backward_->come[static_cast<std::size_t>(unit.value)].erase(offset);
}

std::vector<UnitId> Engine::unclaimed() const {
  const std::lock_guard lock(mutex_);
  std::vector<UnitId> units;
  if (!in_backward_) return units;
  for (const Updated& each : in_backward_->unclaimed) units.push_back(each.unit);
  return units;
}

void Engine::tear(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (torn_.empty()) torn_ = why;
}

void Engine::forget_expected() {
  const std::lock_guard lock(mutex_);
  for (auto& update : in_backward_->expected) update.reset();
}

void Engine::update_held(Stream stream) {
  const std::lock_guard lock(mutex_);
  NORIA_INVARIANT(in_backward_ && !phase_, "what is held is updated between passes");
  Op edits;  // for example a clip, which the device may not have reached yet
  edits.verb = Verb::user;
  for (std::size_t i = 0; i < units_.size(); ++i) {
    if (in_backward_->come[i].empty()) continue;
    const BufferId held = facts_[i].held;
    edits.accesses.push_back({held, issuer_.next_version(held), Access::Mode::write});
  }
  finish_user_op(std::move(edits), stream);
  update_rest(/*what_accumulates=*/true);
}

std::vector<Engine::Updated> Engine::take_updated(const std::set<UnitId>& units) {
  const std::lock_guard lock(mutex_);
  std::vector<Updated> taken;
  std::erase_if(in_backward_->unclaimed, [&](Updated& each) {
    if (!units.contains(each.unit)) return false;
    taken.push_back(std::move(each));
    return true;
  });
  return taken;
}

std::map<Bytes, double> Engine::sums_in_backward(UnitId unit) {
  const std::lock_guard lock(mutex_);
  NORIA_INVARIANT(in_backward_.has_value(), "no update runs inside backward");
  const InBackward::Sums& known = in_backward_->sums[static_cast<std::size_t>(unit.value)];
  std::map<Bytes, double> found;
  if (!known.update || !known.sums) return found;
  known.update->wait_passed();
  for (std::size_t i = 0; i < known.gradients.size(); ++i) found[known.gradients[i]] = (*known.sums)[i];
  return found;
}

// ---- memory -----------------------------------------------------------------------------------------------------

std::optional<int> Engine::take_slot() {
  const auto& readers = in_backward_->reader;
  return in_backward_->ring->take([&](int free) {
    const auto reader = readers.find(free);
    return reader == readers.end() || reader->second->passed();
  });
}

void Engine::hold(UnitId unit) {
  EngineUnit& held = unit_of(unit);
  if (!in_backward_ || held.held != nullptr) return;
  auto slot = take_slot();
  if (!slot) {  // the forwards' count may say that more will come; the expected backward may know better
    const std::int64_t position = book_.position();
    for (std::size_t i = 0; i < units_.size(); ++i) {
      const std::int64_t last = in_backward_->last_visit[i];
      if (in_backward_->slot[i] && last >= 0 && last < position)
        update_in_backward(UnitId(static_cast<std::int32_t>(i)));
    }
    slot = take_slot();
  }
  if (!slot) {
    std::string waiting;
    for (std::size_t i = 0; i < units_.size(); ++i) {
      if (in_backward_->slot[i]) waiting += (waiting.empty() ? "" : ", ") + units_[i].facts.name;
    }
    throw UsageError(
        "gradients of few units on their way at once under update=\"backward\", as each is visited as often "
        "in backward as in forward",
        "no room for those of \"" + held.facts.name + "\" beside the incomplete ones of " + waiting,
        std::string("run forwards that no backward follows under torch.no_grad(), or ") + kRemedy);
  }
  const auto index = static_cast<std::size_t>(unit.value);
  in_backward_->slot[index] = slot;
  const GradientRing& ring = *in_backward_->ring;
  held.held = ring.at(*slot);
  held.facts.held = facts_[index].held = buffers_.intern({{Place::Kind::host, kRingRegion},
                                                          ring.offset(*slot),
                                                          held_bytes(unit),
                                                          Format::travel,
                                                          Purpose::held_gradient,
                                                          unit});
  if (!options_.lane) callbacks_.held_moved(unit, held.held);  // else this rank adds to what is not summed
}

Bytes Engine::held_bytes(UnitId unit) const {
  const Bytes whole = facts_[static_cast<std::size_t>(unit.value)].gradients;
  return options_.lane ? options_.lane->shards().bytes_of(whole) : whole;
}

void Engine::release_held(UnitId unit) {
  auto& slot = in_backward_->slot[static_cast<std::size_t>(unit.value)];
  if (!slot) return;
  in_backward_->ring->release(*std::exchange(slot, std::nullopt));
  unit_of(unit).held = nullptr;
}

// ---- a backward -------------------------------------------------------------------------------------------------

void Engine::note_visits(ItineraryId forward) {
  for (const Visit& visit : book_.visits(forward)) {
    for (UnitId unit : visit.needs) ++in_backward_->visits_made[static_cast<std::size_t>(unit.value)];
  }
}

// Counts a use by another module inside of a visit. In the other direction it may be a visit of its own.
void Engine::count_use(const std::vector<UnitId>& units) {
  InBackward& mode = *in_backward_;
  for (UnitId unit : units) {
    const auto index = static_cast<std::size_t>(unit.value);
    if (phase_ == Phase::forward) ++mode.visits_made[index];
    else count_back(unit);
  }
}

void Engine::count_back(UnitId unit) {
  InBackward& mode = *in_backward_;
  const auto index = static_cast<std::size_t>(unit.value);
  if (only_accumulates(unit)) mode.visits_made[index] = std::max(mode.visits_made[index] - 1, 0);
  else if (mode.visits_left[index]) --*mode.visits_left[index];
}

void Engine::begin_updating(std::optional<ItineraryId> expected) {
  InBackward& mode = *in_backward_;
  std::fill(mode.last_visit.begin(), mode.last_visit.end(), -1);
  if (expected) {
    std::int64_t index = 0;
    for (const Visit& visit : book_.visits(*expected)) {
      for (UnitId unit : visit.needs) mode.last_visit[static_cast<std::size_t>(unit.value)] = index;
      ++index;
    }
  }
  std::fill(mode.is_updated.begin(), mode.is_updated.end(), false);
  for (std::size_t i = 0; i < units_.size(); ++i) drainer_.take_arrivals(UnitId(static_cast<std::int32_t>(i)));
  for (std::size_t i = 0; i < units_.size(); ++i) {
    // A unit that only accumulates takes its own visits off what the forwards have made.
    if (only_accumulates(UnitId(static_cast<std::int32_t>(i)))) continue;
    // If an earlier backward has used up the count, the number is not known: the unit is updated at the end.
    const int made = std::exchange(mode.visits_made[i], 0);
    mode.visits_left[i] = made > 0 ? std::optional(made) : std::nullopt;
  }
}

void Engine::refuse_updated(UnitId unit, const std::string& what) {
  if (!in_backward_ || !in_backward_->is_updated[static_cast<std::size_t>(unit.value)] || phase_ != Phase::backward) {
    return;
  }
  const std::string name = "\"" + unit_of(unit).facts.name + "\"";
  torn_ = "backward updated " + name + " before it was done with it";
  throw UsageError("under update=\"backward\", each unit visited as often in backward as in forward",
                   name + ", of which " + what + " in the backward that had updated it already", kRemedy);
}

// Updates the units that this visit was the last for, by the forwards' count and by the expected backward. If both are
// known, both must say so. Each alone may say so too early: two losses may take different ways back through one
// forward.
void Engine::update_complete(const Visit& visit, bool is_recomputed) {
  InBackward& mode = *in_backward_;
  if (phase_ != Phase::backward) return;
  const std::int64_t position = book_.position();
  for (UnitId unit : visit.needs) {
    if (!is_recomputed) count_back(unit);
    if (only_accumulates(unit)) continue;
    const auto index = static_cast<std::size_t>(unit.value);
    const auto left = mode.visits_left[index];
    const bool is_foreseen = mode.last_visit[index] >= 0;
    const bool is_last = (left || is_foreseen) && left.value_or(0) <= 0 && position >= mode.last_visit[index];
    if (is_last) update_in_backward(unit);
  }
}

void Engine::update_in_backward(UnitId unit) {
  InBackward& mode = *in_backward_;
  const auto index = static_cast<std::size_t>(unit.value);
  const std::set<Bytes> come = std::exchange(mode.come[index], {});
  if (come.empty()) {
    release_held(unit);
    return;
  }
  const EngineUnit& updated = unit_of(unit);
  NORIA_INVARIANT(mode.expected[index].has_value(), "nobody has said how to update " + updated.facts.name);
  const ExpectedUpdate& expected = *mode.expected[index];
  UpdateJob job = expected.job;
  job.gradient = updated.held;
  Updated& claimed = mode.unclaimed.emplace_back(Updated{unit, {}, come});
  const bool is_known = !options_.lane || !phase_;  // else other ranks may have gradients that this rank has not
  job.pieces.clear();
  std::vector<std::optional<std::size_t>> asked;  // by piece: the parameter whose arrival decides; none: it has come
  for (std::size_t i = 0; i < expected.gradients.size(); ++i) {
    const bool has_come = come.contains(expected.gradients[i]);
    if (is_known && !has_come) continue;
    job.pieces.push_back(expected.job.pieces[i]);
    claimed.pieces.emplace_back(expected.gradients[i], expected.job.pieces[i].scalars);
    asked.push_back(has_come ? std::nullopt : std::optional(updated.parameter_at(expected.gradients[i])));
  }
  NORIA_INVARIANT(!is_known || job.pieces.size() == come.size(), "a gradient came that no update wants");
  if (!is_known) {
    job.wants = [arrived = drainer_.take_arrivals(unit), asked](std::size_t piece) {
      return !asked[piece] || (arrived && arrived->contains(*asked[piece]));
    };
  }
  drainer_.forget_sums(unit);
  mode.is_updated[index] = true;
  if (collector_) collector_->note_update(unit);
  issuer_.next_version(updated.facts.working);
  if (options_.lane) job.sums = std::make_shared<std::vector<double>>();
  InBackward::Sums& sums = mode.sums[index];
  sums = {nullptr, job.sums, {}};
  for (const auto& [offset, scalars] : claimed.pieces) sums.gradients.push_back(offset);
  Op op = update_op(unit);
  op.bytes = job.bytes();
  auto begun = issuer_.begin(op);
  const Ticket ticket = optimizer_->submit(begun.label, std::move(job), std::move(begun.waits), urgency_of(unit));
  issuer_.keep(op.id, ticket);
  sums.update = ticket;
  if (mode.slot[index]) mode.reader[*mode.slot[index]] = ticket;
  release_held(unit);
}

bool Engine::only_accumulates(UnitId unit) const {
  return in_backward_->accumulating || (last_of_ && !(*last_of_)[static_cast<std::size_t>(unit.value)]);
}

void Engine::gradients_came(const std::map<UnitId, std::set<Bytes>>& came) {
  const std::lock_guard lock(mutex_);
  if (!in_backward_) return;
  for (const auto& [unit, offsets] : came) {
    const auto index = static_cast<std::size_t>(unit.value);
    if (!in_backward_->is_updated[index]) in_backward_->come[index].insert(offsets.begin(), offsets.end());
  }
  // Updates of this backward have left out pieces whose gradients no rank had. Their record must leave out the same
  // pieces.
  for (Updated& each : in_backward_->unclaimed) {
    const auto found = came.find(each.unit);
    std::erase_if(each.pieces, [&](const auto& piece) {
      const bool is_come = found != came.end() && found->second.contains(piece.first);
      return !is_come && !each.come.contains(piece.first);
    });
  }
}

void Engine::update_rest(bool what_accumulates) {
  for (std::size_t i = 0; i < units_.size(); ++i) {
    const UnitId unit(static_cast<std::int32_t>(i));
    if (in_backward_->is_updated[i] || (only_accumulates(unit) && !what_accumulates)) continue;
    update_in_backward(unit);
  }
}

void Engine::abandon_updating() {
  InBackward& mode = *in_backward_;
  if (!mode.unclaimed.empty() && torn_.empty()) {  // by it, or by backwards of other stages
    torn_ = "a backward raised after " + std::to_string(mode.unclaimed.size()) + " of " +
            std::to_string(units_.size()) + " units had been updated";
  }
  for (auto& offsets : mode.arriving) offsets.clear();
  for (std::size_t i = 0; i < units_.size() && mode.ring; ++i)
    drainer_.forget_sums(UnitId(static_cast<std::int32_t>(i)));
  if (!mode.ring) return;  // what was accumulated is still held
  for (std::size_t i = 0; i < units_.size(); ++i) {
    mode.come[i].clear();
    release_held(UnitId(static_cast<std::int32_t>(i)));
  }
}

// ---- torn ---------------------------------------------------------------------------------------------------------

std::string Engine::torn() const {
  const std::lock_guard lock(mutex_);
  if (!optimizer_) return torn_;
  std::string found = torn_;
  for (std::size_t i = 0; i < committed_.size(); ++i) {
    if (!committed_[i] || !committed_[i]->passed()) continue;
    try {
      committed_[i]->wait_passed();
    } catch (const std::exception& error) {
      found +=
          (found.empty() ? "" : "; ") + ("the draft of " + units_[i].facts.name) + " broke off (" + error.what() + ")";
    }
  }
  for (const auto& [unit, why] : optimizer_->torn()) {
    found += (found.empty() ? "" : "; ") +
             ("the update of " + units_[static_cast<std::size_t>(unit.value)].facts.name) + " broke off (" + why + ")";
  }
  return found;
}

void Engine::refuse_torn() const {
  const std::string why = torn();
  if (why.empty()) return;
  throw MachineError("weights and optimizer state are of different steps: " + why +
                     ". Load a checkpoint of both: model.load_state_dict and optimizer.load_state_dict");
}

void Engine::mend() {
  const std::lock_guard lock(mutex_);
  torn_.clear();
  if (in_backward_) in_backward_->unclaimed.clear();
  if (!optimizer_) return;
  optimizer_->idle();
  backend_->idle();
  optimizer_->mend();
  committed_.assign(committed_.size(), nullptr);
  try {
    issuer_.sweep();
  } catch (...) {  // NOLINT(bugprone-empty-catch): tickets of what has been mended; the caller has heard of it
  }
}

}  // namespace noria
