#include "engine/engine.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace noria {

Engine::Engine(EngineOptions options, std::shared_ptr<Backend> backend, UnitMap<EngineUnit> units, BufferTable buffers,
               EngineCallbacks& callbacks, std::shared_ptr<HostOptimizer> optimizer)
    : options_(std::move(options)),
      backend_(std::move(backend)),
      units_(std::move(units)),
      buffers_(std::move(buffers)),
      callbacks_(callbacks),
      optimizer_(std::move(optimizer)),
      issuer_(*backend_, buffers_, options_.lane && options_.lane->assists()),
      leases_(backend_, options_.budget.arena),
      collector_(options_.lane ? std::make_optional<Collector>(issuer_, units_, options_.lane, options_.scratch,
                                                               /*takes_sums=*/!options_.ring)
                               : std::nullopt),
      files_(options_.files.home ? std::make_unique<FileStates>(options_.files, issuer_, units_) : nullptr),
      parts_{options_,    *backend_,        units_,  buffers_,
             callbacks_,  optimizer_.get(), issuer_, collector_ ? &*collector_ : nullptr,
             files_.get()},
      file_weights_(options_.file_weights.store ? std::make_unique<FileWeights>(options_.file_weights, issuer_, units_)
                                                : nullptr),
      copies_(issuer_),
      fetcher_(issuer_, leases_, units_, options_.device, parts_.collector, file_weights_.get(), copies_),
      drainer_(issuer_, leases_, units_, options_.device, callbacks_, parts_.collector, options_.ring.has_value()),
      activations_(options_.saves
                       ? std::make_optional<ActivationStore>(
                             issuer_, *backend_, callbacks_,
                             [this](Bytes least) { return gate_.outside([&] { return callbacks_.more_home(least); }); },
                             options_.saved_room)
                       : std::nullopt),
      compute_(*backend_, issuer_),
      updates_(parts_, compute_, update_time_,
               [this](UnitId unit) { gate_.outside([&] { callbacks_.update(unit); }); }),
      drafts_(parts_, updates_),
      backward_updates_(options_.ring ? std::make_optional<BackwardUpdates>(parts_, pass_, compute_, updates_, drafts_,
                                                                            drainer_, *options_.ring)
                                      : std::nullopt),
      stats_(parts_, updates_, drainer_, activations_ ? &*activations_ : nullptr, update_time_),
      runner_(parts_, pass_,
              {compute_, fetcher_, drainer_, activations_ ? &*activations_ : nullptr, updates_, drafts_,
               backward_updates_ ? &*backward_updates_ : nullptr, stats_}) {
  backend_->set_update_time(update_time_);
  if (optimizer_) optimizer_->set_update_time(update_time_);
}

Engine::~Engine() {
  try {  // before the leases are freed: a lane may be writing there
    close_lanes();
  } catch (...) {  // NOLINT(bugprone-empty-catch): a caller that wants to hear of it calls close()
  }
}

// ---- passes -------------------------------------------------------------------------------------------------------

void Engine::begin_pass(const Signature& signature, Stream stream) {
  const Entry entry(gate_);
  if (!leases_.is_taken()) {
    throw UsageError("a model that has its device memory",
                     "a pass inside of `with noria.asleep(model)`, or behind it without room to take the memory again",
                     "leave the block and free device memory: the model's next forward or step() takes it again");
  }
  end_open_pass(stream);
  sweep();
  updates_.refuse_torn();
  if (signature.accumulating && options_.shows_gradients()) note_edits(Edits::before_backward, stream);
  runner_.begin(signature);
}

// A backward that is still open has raised. A forward that is still open has simply come to its end.
void Engine::end_open_pass(Stream stream) {
  compute_.continue_on(stream);
  if (pass_.is(Phase::backward)) runner_.reset(stream);
  if (pass_.phase) runner_.end(stream);
}

// A unit's copies are not used again if a copy of its weights has failed, or if the user has written it. It is fetched
// anew.
void Engine::sweep() {
  for (const UnitId unit : callbacks_.take_stale()) {
    fetcher_.mark_stale(unit);
    runner_.forget_plan();
  }
  std::vector<OpLabel> failed;
  const auto fetch_again = [&]() NORIA_REQUIRES(gate_) {
    for (const OpLabel& op : failed) {
      if (op.verb != Verb::fetch && op.verb != Verb::gather && op.verb != Verb::stash) continue;
      fetcher_.mark_stale(op.unit);
      runner_.forget_plan();
    }
  };
  try {
    issuer_.sweep(failed);
  } catch (...) {
    fetch_again();
    throw;
  }
  fetch_again();
}

void Engine::announce(HookId hook, const std::vector<UnitId>& needs, Phase phase, Stream stream, bool recomputes) {
  const Entry entry(gate_);
  compute_.continue_on(stream);
  runner_.announce(hook, needs, phase, stream, recomputes);
}

void Engine::leave(Stream stream) {
  const Entry entry(gate_);
  compute_.continue_on(stream);
  runner_.leave(stream);
}

void Engine::expect_gradient(UnitId unit, Stream stream) {
  const Entry entry(gate_);
  compute_.continue_on(stream);
  runner_.expect_gradient(unit, stream);
}

bool Engine::is_brought(UnitId unit, Bytes offset, Bytes bytes) const {
  const Entry entry(gate_);
  return drainer_.is_brought(unit, offset, bytes);
}

void Engine::gradient_arrived(UnitId unit, Bytes offset, Bytes bytes) {
  const Entry entry(gate_);
  drainer_.arrived(unit, offset, bytes);
  if (backward_updates_ && bytes > Bytes{0}) backward_updates_->note_gradient(unit, offset);
}

std::vector<UnitId> Engine::end_pass(Stream stream) {
  const Entry entry(gate_);
  if (!pass_.phase) return {};
  compute_.continue_on(stream);
  return runner_.end(stream);
}

void Engine::reset(Stream stream) {
  const Entry entry(gate_);
  compute_.continue_on(stream);
  runner_.reset(stream);
}

std::optional<Phase> Engine::phase() const {
  const Entry entry(gate_);
  return pass_.phase;
}

ItineraryId Engine::last_forward() const {
  const Entry entry(gate_);
  return pass_.last_forward;
}

bool Engine::is_visited(const std::vector<UnitId>& needs) const {
  const Entry entry(gate_);
  return compute_.is_visited(needs);
}

std::vector<UnitId> Engine::next_forward_order() const {
  const Entry entry(gate_);
  return runner_.next_forward_order();
}

// ---- updates ------------------------------------------------------------------------------------------------------

void Engine::begin_step(Stream stream, const std::vector<UnitId>& scaled, const std::function<void()>& scale) {
  const Entry entry(gate_);
  end_open_pass(stream);
  sweep();
  updates_.refuse_torn();
  if (options_.shows_gradients() || !scaled.empty()) note_edits(Edits::before_step, stream, scaled, scale);
}

// All that the user's loop did to the held gradients is on the stream by now. Before a backward the op names only
// gradients that are added to, because a backward must not wait for updates that still read others.
void Engine::note_edits(Edits edits, Stream stream, const std::vector<UnitId>& scaled,
                        const std::function<void()>& scale) {
  Op op;
  op.verb = Verb::user;
  for (UnitId unit : scaled) op.accesses.push_back(updates_.write_scales(unit));
  for (UnitId unit : units_.ids()) {
    if (units_[unit].held == nullptr || !options_.shows_gradients()) continue;
    if (edits == Edits::before_backward && callbacks_.held_gradients(unit).empty()) continue;
    if (drafts_.is_read(unit)) continue;
    const BufferId held = units_[unit].facts.held;
    op.accesses.push_back({held, issuer_.next_version(held), Access::Mode::write});
  }
  compute_.pass(std::move(op), stream, scale);
}

std::vector<std::vector<double>> Engine::sum_gradients(std::vector<std::pair<UnitId, UpdateJob>> jobs, Stream stream) {
  const Entry entry(gate_);
  NORIA_INVARIANT(optimizer_ != nullptr, "this engine has no host pool");
  end_open_pass(stream);
  if (options_.shows_gradients()) note_edits(Edits::before_step, stream);
  return drafts_.sums(std::move(jobs));
}

void Engine::update_on_pool(UnitId unit, UpdateJob job, int priority) {
  const Entry entry(gate_);
  NORIA_INVARIANT(optimizer_ != nullptr, "this engine has no host pool");
  drafts_.update(unit, std::move(job), priority);
}

void Engine::defer_update(UnitId unit) {
  const Entry entry(gate_);
  drafts_.drop(unit);
  updates_.defer(unit);
}

void Engine::run_deferred(UnitId unit) {
  const Entry entry(gate_);
  updates_.run_deferred(unit);
}

void Engine::run_all_deferred() {
  const Entry entry(gate_);
  run_all_deferred_locked();
}

void Engine::run_all_deferred_locked() {
  for (UnitId unit : runner_.next_forward_order()) updates_.run_deferred(unit);
}

void Engine::end_step(bool blocking) {
  const Entry entry(gate_);
  pass_.book.note_update();
  if (collector_) {
    collector_->end_step();
    collector_->turn(Phase::forward);
    try {
      run_all_deferred_locked();  // other ranks may need the weights before this rank does
    } catch (...) {               // other ranks have made these updates
      updates_.mark_torn("an update by torch has raised, and others of the same step were not made");
      throw;
    }
  }
  drafts_.end_step();
  if (blocking) {
    run_all_deferred_locked();
    if (optimizer_) optimizer_->idle();
    if (files_) files_->idle();
    if (updates_.streamed().is_used()) backend_->idle();
    sweep();
  }
  updates_.streamed().fetch_ahead();
  if (options_.prefetch_at_step && !updates_.is_any_deferred() && !has_diverged_) runner_.prepare_next_forward();
  stats_.end_step();
  if (!trace_) return;
  // Marks the end of the step, which visits do not show. The mark is an op, because an id tells its place in issue
  // order. Its time does not: the device may be far behind the host.
  Op mark;
  mark.verb = Verb::user;
  issuer_.begin(mark);
  const std::int64_t now_us = trace_->now_us();
  trace_->add({mark.id, mark.lane, mark.verb, mark.unit, now_us, now_us, {}, {}});
}

void Engine::set_update_slots(std::byte* memory, Bytes bytes_of_one, int num_slots) {
  const Entry entry(gate_);
  run_all_deferred_locked();
  backend_->idle();
  updates_.streamed().set_slots(memory, bytes_of_one, num_slots);
}

void Engine::set_update_pieces(UnitId unit, std::vector<StreamedUpdates::Piece> pieces) {
  const Entry entry(gate_);
  updates_.run_deferred(unit);
  updates_.streamed().set_pieces(unit, std::move(pieces));
}

StreamedUpdates::Now Engine::updated_now() const {
  const Entry entry(gate_);
  return updates_.streamed().now();
}

std::string Engine::torn() const {
  const Entry entry(gate_);
  return updates_.torn();
}

void Engine::mark_torn(const std::string& why) {
  const Entry entry(gate_);
  updates_.mark_torn(why);
}

void Engine::clear_torn() {
  const Entry entry(gate_);
  if (backward_updates_) backward_updates_->clear_torn();
  updates_.clear_torn();
  forget_failures();
}

// Forgets ops that have failed, so that no later op waits for them.
void Engine::forget_failures() {
  try {
    sweep();
  } catch (...) {  // NOLINT(bugprone-empty-catch): the caller has heard of them
  }
}

// ---- what forwards save, and units at peers -----------------------------------------------------------------------

Held<ActivationStore> Engine::activations() {
  NORIA_INVARIANT(activations_.has_value(), "nothing that forwards save may leave");
  return {gate_, *activations_};
}

SavedStats Engine::saved_stats() const {
  const Entry entry(gate_);
  return activations_ ? activations_->stats() : SavedStats{};
}

std::map<HookId, SavedByModule> Engine::saved_by_module() const {
  const Entry entry(gate_);
  return activations_ ? activations_->by_module() : std::map<HookId, SavedByModule>{};
}

void Engine::await_saved(SavedId saved, Stream stream) {
  const Entry entry(gate_);
  if (closed_) {
    throw UsageError("backward before noria.unwrap, or the end of the model",
                     "a backward that needs what has been moved to the home, which is gone", "call backward() first");
  }
  activations_->await(saved, stream);
  compute_.add_stall(activations_->take_waited_us());
}

void Engine::keep_copies(const std::vector<UnitId>& units) {
  const Entry entry(gate_);
  NORIA_INVARIANT(!options_.lane, "a unit that ranks gather is not fetched by one of them alone");
  std::vector<std::pair<UnitId, Bytes>> kept;
  for (UnitId unit : units) kept.emplace_back(unit, units_[unit].facts.weights);
  copies_.keep(std::move(kept));
}

// ---- all of it ----------------------------------------------------------------------------------------------------

void Engine::set_trace(std::shared_ptr<Trace> trace) {
  const Entry entry(gate_);
  backend_->set_trace(trace);
  if (optimizer_) optimizer_->set_trace(trace);
  if (activations_) activations_->set_trace(trace);
  if (files_) files_->set_trace(trace);
  if (file_weights_) file_weights_->set_trace(trace);
  updates_.set_trace(trace);
  trace_ = std::move(trace);
}

void Engine::sleep(Stream stream) {
  const Entry entry(gate_);
  end_open_pass(stream);
  runner_.evict_all();
  if (options_.lane) options_.lane->idle();
  backend_->idle();  // fetches made ahead, and the overwriting of what was evicted
  sweep();
  leases_.give_up();
}

void Engine::wake() {
  const Entry entry(gate_);
  leases_.take_again();
}

Bytes Engine::resize(Bytes arena) {
  const Entry entry(gate_);
  const Bytes least = smallest_budget(pass_.book.all_visits(), units_.facts()).arena;
  arena = std::max(align_up(arena, kTensorAlignment), align_up(least, kTensorAlignment));
  leases_.resize(arena);
  options_.budget.arena = arena;
  runner_.forget_all_plans();
  return arena;
}

void Engine::idle() {
  const Entry entry(gate_);
  if (options_.lane) options_.lane->idle();
  backend_->idle();
  if (optimizer_) optimizer_->idle();
  if (files_) files_->idle();
  if (file_weights_) file_weights_->idle();
  sweep();
}

void Engine::close() {
  const Entry entry(gate_);
  if (std::exchange(closed_, true)) return;
  try {
    runner_.reset(Stream());
  } catch (...) {  // NOLINT(bugprone-empty-catch): the caller has heard of it before; nothing runs after this
  }
  close_lanes();
}

// Each of them ends even if another one throws.
void Engine::close_lanes() {
  std::exception_ptr failure;
  const auto attempt = [&](const auto& close) {
    try {
      close();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  };
  attempt([&] {
    if (optimizer_) optimizer_->close();
  });
  attempt([&] {
    if (files_) files_->close();
  });
  attempt([&] {
    if (file_weights_) file_weights_->close();
  });
  attempt([&] {
    if (options_.lane) options_.lane->close();
  });
  attempt([&] { backend_->close(); });
  if (failure) std::rethrow_exception(failure);
}

}  // namespace noria
