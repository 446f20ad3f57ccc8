#include "bare_engine.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/errors.h"
#include "device/host_backend.h"
#include "device/timing.h"

namespace noria {
namespace {

// A float in [-0.5, 0.5), exactly, from any bits; `coarse`: so few digits that sums of some are exact.
float spread(std::uint32_t bits, std::uint32_t number, bool coarse = false) {
  const std::uint32_t hash = (bits ^ (number * 0x9E3779B9U)) * 2654435761U;
  return coarse ? static_cast<float>(hash >> 20) * 0x1p-12F - 0.5F : static_cast<float>(hash >> 8) * 0x1p-24F - 0.5F;
}

float* floats(std::byte* memory) { return reinterpret_cast<float*>(memory); }

enum class Write { plain, onto_held, onto_buffer };

constexpr double kRate = 0.05;

}  // namespace

BareMachine make_host_machine(const Hostility& hostility, bool asynchronous) {
  auto backend = std::make_shared<HostBackend>(HostBackendOptions{Bytes{1 << 24}, slow(hostility)});
  if (!asynchronous) return {backend, {}, {}, [](Stream, const std::function<void()>& work) { work(); }};
  auto* host = backend.get();
  return {backend, host->create_stream(), host->create_stream(),
          [host](Stream stream, std::function<void()> work) { host->enqueue(stream, std::move(work)); }};
}

BareEngine::BareEngine(const std::vector<BareUnit>& units, BareMachine machine, Budget budget, bool prefetch_at_step,
                       std::shared_ptr<HostOptimizer> optimizer, bool drafts, int ring_slots,
                       std::shared_ptr<Collectives> collectives, bool assists)
    : machine_(std::move(machine)),
      shards_(collectives ? Shards{collectives->rank(), collectives->size()} : Shards{}),
      // Braces: the units are laid out before the buffers that this interns are moved.
      engine_{options(budget, prefetch_at_step, units, ring_slots, collectives, assists),
              machine_.backend,
              lay_out(units, drafts, ring_slots > 0),
              std::move(buffers_),
              *this,
              std::move(optimizer)} {}

EngineOptions BareEngine::options(Budget budget, bool prefetch_at_step, const std::vector<BareUnit>& units,
                                  int ring_slots, const std::shared_ptr<Collectives>& collectives, bool assists) {
  EngineOptions result;
  result.device = {Place::Kind::device, 0};
  result.budget = budget;
  result.prefetch_at_step = prefetch_at_step;
  if (collectives) {
    std::vector<std::string> names;
    for (std::size_t unit = 0; unit < units.size(); ++unit) names.push_back("unit " + std::to_string(unit));
    result.lane = std::make_shared<CollectLane>(machine_.backend, collectives, std::move(names), assists);
  }
  if (ring_slots == 0) return result;
  Bytes slot;
  for (const BareUnit& unit : units) slot = std::max(slot, kSlotBytes * unit.num_trainable);
  ring_ = Arena(slot * ring_slots);
  ring_.register_with(machine_.backend);
  result.ring = GradientRing(ring_.data(), slot, ring_slots);
  return result;
}

// With room for every old value: programs are short, and in the first steps most blocks would be left out.
UndoLogSize BareEngine::log_size(const BareUnit& unit) const {
  const std::int64_t num_elements = unit.num_trainable * kSlotElements / shards_.size;
  return {num_elements, unit.num_trainable, 3 * num_elements};
}

Bytes BareEngine::log_bytes(const BareUnit& unit) const { return undo_log_bytes(log_size(unit)); }

UnitMap<EngineUnit> BareEngine::lay_out(const std::vector<BareUnit>& units, bool drafts, bool ring) {
  Bytes total, all_gradients;
  for (const BareUnit& unit : units) {
    total += shards_.bytes_of(kSlotBytes * unit.num_slots);
    all_gradients += kSlotBytes * unit.num_trainable;
  }
  if (shards_.size > 1) {
    unreduced_ = Arena(all_gradients);
    unreduced_.register_with(machine_.backend);
  }
  for (Arena& array : home_) {
    array = Arena(total);
    std::memset(array.data(), 0, static_cast<std::size_t>(total.count));
    array.register_with(machine_.backend);
  }
  Bytes logs;
  for (const BareUnit& unit : units) logs += log_bytes(unit);
  logs_ = Arena(drafts ? logs : Bytes{0});
  std::byte* log = logs_.data();
  std::vector<EngineUnit> result;
  Bytes start;
  for (const BareUnit& described : units) {
    const UnitId id(static_cast<std::int32_t>(result.size()));
    const Bytes weights = kSlotBytes * described.num_slots;
    const Bytes gradients = kSlotBytes * described.num_trainable;
    const Bytes at_home = shards_.bytes_of(weights);
    Unit unit;
    unit.slots.resize(static_cast<std::size_t>(described.num_trainable));
    for (std::size_t i = 0; i < home_.size(); ++i) unit.home[i] = floats(home_[i].data() + start.count);
    const auto num_elements = static_cast<std::uint32_t>(described.num_slots * kSlotElements);
    unit.result.resize(num_elements);
    unit.num_at_home = num_elements / static_cast<std::uint32_t>(shards_.size);
    const auto num_trained = static_cast<std::uint32_t>(described.num_trainable * kSlotElements);
    std::size_t at = 0;
    for (const auto& [begin, end] : {std::pair{0U, num_trained}, std::pair{num_trained, num_elements}}) {
      const std::uint32_t part = (end - begin) / static_cast<std::uint32_t>(shards_.size);
      const std::uint32_t own = begin + part * static_cast<std::uint32_t>(shards_.rank);
      for (std::uint32_t i = own; i < own + part; ++i) {
        unit.home[0][at++] = spread(i, static_cast<std::uint32_t>(id.value) + 1);
      }
    }
    units_.push_back(std::move(unit));

    EngineUnit made;
    made.facts = {"unit " + std::to_string(id.value), weights, gradients, {}, {}, {}};
    const auto range = [&](int region, Bytes offset, Bytes bytes, Purpose purpose) {
      return buffers_.intern({{Place::Kind::host, region}, offset, bytes, Format::travel, purpose, id});
    };
    made.facts.working = range(kWorkingRegion, start, at_home, Purpose::working_copy);
    made.facts.held = range(kHeldRegion, start, shards_.bytes_of(gradients), Purpose::held_gradient);
    made.facts.state = range(kStateRegion, Bytes{id.value}, Bytes{1}, Purpose::optimizer_state);
    made.sum = range(kSumRegion, Bytes{id.value}, Bytes{1}, Purpose::gradient_sum);
    made.working = home_[0].data() + start.count;
    if (described.num_trainable > 0 && !ring) made.held = home_[1].data() + start.count;
    if (drafts && described.num_trainable > 0) {
      made.undo_log = undo_log_at(log, log_size(described));
      units_.back().is_drafted = true;
      log += log_bytes(described).count;
    }
    result.push_back(std::move(made));
    start += at_home;
  }
  return UnitMap(std::move(result));
}

BareEngine::~BareEngine() { release_stream(); }  // the engine closes the lanes

// ---- passes -----------------------------------------------------------------------------------------------------

void BareEngine::begin_forward(std::int32_t root, bool training, bool grad_enabled) {
  phase_ = Phase::forward;
  engine_.begin_pass({Phase::forward, root, grad_enabled, training, false, {}}, machine_.stream);
}

void BareEngine::begin_backward() {
  phase_ = Phase::backward;
  Signature signature;
  signature.phase = Phase::backward;
  signature.forward = engine_.last_forward();
  for (const Unit& unit : units_) {
    for (const Slot& slot : unit.slots) signature.accumulating |= slot.held;
  }
  engine_.begin_pass(signature, machine_.stream);
}

void BareEngine::compute(std::function<void()> kernel) {
  machine_.enqueue(machine_.stream, [kernel = std::move(kernel), us = machine_.kernel_us] {
    if (us > 0) sleep_until_ns(now_ns() + us * 1000);
    kernel();
  });
}

void BareEngine::visit(std::int32_t hook, const std::vector<UnitId>& needs) {
  engine_.announce(HookId(hook), needs, phase_, machine_.stream);
  for (UnitId id : needs) {
    Unit& unit = of(id);
    NORIA_INVARIANT(unit.attached != nullptr, "a visited unit is not attached");
    compute([weights = unit.attached, &result = unit.result] {
      for (std::size_t i = 0; i < result.size(); ++i) {
        const auto bits = std::bit_cast<std::uint32_t>(floats(weights)[i]);
        result[i] = result[i] * 1664525U + bits + 1013904223U;
      }
    });
  }
}

void BareEngine::open_gradients(UnitId unit, std::byte* buffer) {
  of(unit).buffer = buffer;
  for (Slot& slot : of(unit).slots) slot.written = false;
}

Ranges BareEngine::held_gradients(UnitId unit) const {
  Ranges held;
  const auto& slots = units_[static_cast<std::size_t>(unit.value)].slots;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const Bytes begin = kSlotBytes * static_cast<std::int64_t>(i);
    if ((slots[i].arrived || slots[i].held) && !slots[i].kept) held.add(begin, begin + kSlotBytes);
  }
  return held;
}

void BareEngine::gradient(std::size_t unit, std::size_t slot) {
  const UnitId id(static_cast<std::int32_t>(unit));
  engine_.expect_gradient(id, machine_.stream);
  Unit& into = units_[unit];
  Slot& state = into.slots.at(slot);
  const Bytes offset = kSlotBytes * static_cast<std::int64_t>(slot);
  const bool adds = shards_.size > 1 ? engine_.is_unreduced(id, offset, kSlotBytes) : state.arrived || state.held;
  const bool onto_buffer = state.written || (adds && engine_.is_brought(id, offset, kSlotBytes));
  const Write write = onto_buffer ? Write::onto_buffer : adds ? Write::onto_held : Write::plain;
  if (write == Write::plain) state.guarded = false;  // the drain waits for readers of what was held
  const std::size_t start = slot * kSlotElements;
  const float* onto = shards_.size > 1 ? into.unreduced : into.home[1];
  compute([write, number = ++num_gradients_, result = into.result.data() + start, held = onto + start,
           buffer = floats(into.buffer) + start, coarse = shards_.size > 1] {
    for (std::size_t i = 0; i < kSlotElements; ++i) {
      const float gradient = spread(result[i], number, coarse);
      if (write == Write::onto_buffer) buffer[i] += gradient;
      else buffer[i] = write == Write::onto_held ? held[i] + gradient : gradient;
    }
  });
  state.written = state.arrived = true;
  engine_.gradient_arrived(id, offset, kSlotBytes);
}

void BareEngine::end_pass() {
  engine_.end_pass(machine_.stream);
  for (Unit& unit : units_) {
    const bool is_read = engine_.drafts()->is_read(UnitId(static_cast<std::int32_t>(&unit - units_.data())));
    for (Slot& slot : unit.slots) {
      slot.held |= std::exchange(slot.arrived, false);
      slot.guarded |= is_read;
    }
  }
}

void BareEngine::reset() {
  for (Unit& unit : units_) {
    for (Slot& slot : unit.slots) slot.written = slot.arrived = false;
  }
  engine_.reset(machine_.stream);
}

// ---- the user's loop --------------------------------------------------------------------------------------------

void BareEngine::scale(std::size_t unit, std::size_t slot, float factor) {
  Slot& state = units_[unit].slots.at(slot);
  // In a backward every write is heard: what it reads ahead is added to.
  if (std::exchange(state.guarded, false) || engine_.phase() == Phase::backward) {
    engine_.access_held(UnitId(static_cast<std::int32_t>(unit)), machine_.stream);
  }
  compute([factor, held = units_[unit].home[1] + slot * kSlotElements] {
    for (std::size_t i = 0; i < kSlotElements; ++i) held[i] *= factor;
  });
}

void BareEngine::keep(std::size_t unit, std::size_t slot) { units_[unit].slots.at(slot).kept = true; }

void BareEngine::look(std::size_t unit, std::size_t slot) {
  const std::size_t start = slot * kSlotElements;
  compute([held = units_[unit].home[1] + start, result = units_[unit].result.data() + start] {
    for (std::size_t i = 0; i < kSlotElements; ++i) {
      result[i] = result[i] * 1664525U + std::bit_cast<std::uint32_t>(held[i]) + 1013904223U;
    }
  });
}

void BareEngine::zero_grad() {
  for (Unit& unit : units_) {
    const UnitId id(static_cast<std::int32_t>(&unit - units_.data()));
    for (Slot& slot : unit.slots) slot.held = false;  // still guarded: the user may have kept it
    const Bytes gradients = kSlotBytes * static_cast<std::int64_t>(unit.slots.size());
    if (shards_.size > 1) engine_.drop_gradient(id, {}, gradients);
  }
}

void BareEngine::set_unsynced(bool unsynced) {
  if (unsynced && !engine_.holds_unreduced()) {
    std::vector<std::byte*> memory;
    std::byte* next = unreduced_.data();
    for (const Unit& unit : units_) {
      memory.push_back(next);
      next += (kSlotBytes * static_cast<std::int64_t>(unit.slots.size())).count;
    }
    engine_.hold_unreduced(UnitMap(std::move(memory)), machine_.stream);
  }
  engine_.set_unsynced(unsynced);
}

void BareEngine::update(std::size_t unit, bool on_pool) {
  const UnitId id(static_cast<std::int32_t>(unit));
  engine_.run_deferred(id);  // the update before this one
  Unit& updated = units_[unit];
  for (Slot& slot : updated.slots) {
    if (!slot.held) continue;
    slot.guarded = true;
    ++slot.num_updates;
    slot.pending = !on_pool;
  }
  UpdateJob job = job_of(unit, kRate, 0);
  if (job.pieces.empty()) return;
  if (!on_pool) {
    engine_.defer_update(id);
    return;
  }
  engine_.update_on_pool(id, std::move(job), static_cast<int>(unit));
}

UpdateJob BareEngine::job_of(std::size_t unit, double lr, std::int64_t more) {
  const Unit& updated = units_[unit];
  UpdateJob job;
  UpdateHyper hyper;
  hyper.lr = lr;
  hyper.weight_decay = 0.01;
  const auto part = static_cast<std::int64_t>(updated.slots.size()) * kSlotElements / shards_.size;
  const std::int64_t own = part * shards_.rank;
  for (std::size_t i = 0; i < updated.slots.size(); ++i) {
    const Slot& slot = updated.slots[i];
    if (more == 0 && !slot.held) continue;
    const std::int64_t start = static_cast<std::int64_t>(i) * kSlotElements;  // a slot may lie outside of the own part
    const std::int64_t begin = std::clamp(start, own, own + part);
    const std::int64_t end = std::clamp(start + kSlotElements, own, own + part);
    UpdatePiece& piece = job.pieces.emplace_back();
    piece.offset = begin - own;
    piece.count = end - begin;
    piece.scalars = update_scalars(job.rule, hyper, std::max<std::int64_t>(1, slot.num_updates + more));
  }
  job.arrays = {updated.home[0], nullptr, nullptr, {.fp32 = updated.home[2]}, {.fp32 = updated.home[3]}};
  job.gradient = updated.home[1];
  return job;
}

void BareEngine::expect_updates(double lr) {
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    UpdateJob job = job_of(unit, lr, 1);
    if (job.pieces.empty()) continue;
    job.sums = std::make_shared<std::vector<double>>();
    if (!units_[unit].is_drafted) job.task = UpdateTask::sum;
    engine_.drafts()->expect(UnitId(static_cast<std::int32_t>(unit)), std::move(job));
  }
}

void BareEngine::expect_in_backward() {
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    UpdateJob job = job_of(unit, kRate, 1);
    std::vector<Bytes> gradients;
    for (std::size_t slot = 0; slot < job.pieces.size(); ++slot) {  // all of them
      gradients.push_back(kSlotBytes * static_cast<std::int64_t>(slot));
    }
    if (gradients.empty()) continue;
    engine_.backward_updates()->expect(UnitId(static_cast<std::int32_t>(unit)), {std::move(job), std::move(gradients)});
  }
}

void BareEngine::claim() {
  engine_.begin_step(machine_.stream);
  std::set<UnitId> all;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) all.insert(UnitId(static_cast<std::int32_t>(unit)));
  for (const BackwardUpdates::Updated& each : engine_.backward_updates()->take_updated(all)) {
    for (const auto& [gradient, scalars] : each.pieces) {
      ++of(each.unit).slots.at(static_cast<std::size_t>(gradient.count / kSlotBytes.count)).num_updates;
    }
  }
  zero_grad();
  engine_.end_step(/*blocking=*/false);
}

std::vector<double> BareEngine::sums() {
  std::vector<std::pair<UnitId, UpdateJob>> jobs;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    UpdateJob job = job_of(unit, kRate, 0);
    job.task = UpdateTask::sum;
    if (!job.pieces.empty()) jobs.emplace_back(UnitId(static_cast<std::int32_t>(unit)), std::move(job));
  }
  std::vector<double> flat;
  for (const auto& each : engine_.sum_gradients(std::move(jobs), machine_.stream)) {
    flat.insert(flat.end(), each.begin(), each.end());
  }
  return flat;
}

std::pair<std::byte*, Bytes> BareEngine::more_home(Bytes) { throw InvariantError("the bare engine saves nothing"); }
std::byte* BareEngine::make_room(SavedId, Bytes) { throw InvariantError("the bare engine saves nothing"); }
void BareEngine::fill(SavedId, const std::byte*, Bytes) { throw InvariantError("the bare engine saves nothing"); }
void BareEngine::release_saved(SavedId) { throw InvariantError("the bare engine saves nothing"); }

void BareEngine::update(UnitId unit) {
  if (std::exchange(fail_next_update_, false)) throw MachineError("the update of " + std::to_string(unit.value));
  auto& [weights, held, moment, unused] = of(unit).home;
  for (std::size_t slot = 0; slot < of(unit).slots.size(); ++slot) {
    if (!std::exchange(of(unit).slots[slot].pending, false)) continue;
    for (std::size_t i = slot * kSlotElements; i < (slot + 1) * kSlotElements; ++i) {
      moment[i] = 0.5F * moment[i] + held[i];
      weights[i] -= 0.25F * moment[i];
    }
  }
}

std::vector<float> BareEngine::read_home(std::size_t unit) {
  engine_.access_home(UnitId(static_cast<std::int32_t>(unit)), /*write_weights=*/false);
  return array("weights", unit);
}

void BareEngine::write_home(std::size_t unit, float value) {
  engine_.access_home(UnitId(static_cast<std::int32_t>(unit)), /*write_weights=*/true);
  for (std::size_t i = 0; i < units_[unit].num_at_home; ++i) {
    units_[unit].home[0][i] = units_[unit].home[0][i] * 0.5F + value;
  }
}

// ---- a peer -----------------------------------------------------------------------------------------------------

void BareEngine::lend(Bytes bytes) {
  lender_ = std::make_shared<HostBackend>(HostBackendOptions{bytes});
  std::byte* const memory = lender_->allocate_shared(bytes);
  std::memset(memory, 0xFF, static_cast<std::size_t>(bytes.count));
  engine_.copies()->add_peer({1, 0, 1, machine_.backend->open_shared(lender_->shared(memory)), bytes});
}

// ---- failures ---------------------------------------------------------------------------------------------------

void BareEngine::hold_stream() {
  stream_hold_ = std::make_shared<HostTicket>(OpLabel{});
  machine_.enqueue(machine_.stream, [hold = stream_hold_] { hold->wait_passed(); });
}

void BareEngine::release_stream() {
  if (auto hold = std::exchange(stream_hold_, nullptr)) hold->pass();
}

void BareEngine::break_stream() {
  machine_.enqueue(machine_.stream, [] { throw MachineError("a kernel failed"); });
}

// ---- what came out ----------------------------------------------------------------------------------------------

void BareEngine::await_stream() {
  const Ticket end = machine_.backend->open({});
  machine_.backend->give(end, machine_.stream);
  end->wait_passed();
}

void BareEngine::idle() {
  engine_.run_all_deferred();
  await_stream();
  engine_.idle();
}

void BareEngine::close() { engine_.close(); }

std::vector<float> BareEngine::array(const std::string& which, std::size_t unit) const {
  static const std::array<std::string, 4> names{"weights", "held", "moment1", "moment2"};
  const auto found = std::find(names.begin(), names.end(), which);
  const float* start = units_[unit].home.at(static_cast<std::size_t>(found - names.begin()));
  return {start, start + units_[unit].num_at_home};
}

std::vector<std::uint8_t> BareEngine::arena() const {
  const auto leases = engine_.leases();
  const auto* start = reinterpret_cast<const std::uint8_t*>(leases->at(Bytes{0}));
  return {start, start + leases->arena_bytes().count};
}

}  // namespace noria
