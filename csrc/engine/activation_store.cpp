#include "engine/activation_store.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"
#include "engine/unit.h"

namespace noria {
namespace {

void note_least(std::int64_t& least, std::int64_t us) { least = least == 0 ? us : std::min(least, us); }

}  // namespace

void ActivationStore::begin_pass(Phase phase, bool saves) {
  is_inside_ = false;
  saves_ = phase == Phase::forward && saves;
  if (phase == Phase::backward) return;
  open_.reset();
  for (auto bundle = bundles_.begin(); bundle != bundles_.end();) {
    if (is_any_alive(*bundle)) {
      ++bundle;
      continue;
    }
    std::erase(staying_, bundle);
    bundle = bundles_.erase(bundle);
  }
  if (!saves_) return;
  const bool is_all_used = std::all_of(bundles_.begin(), bundles_.end(),
                                       [](const Bundle& bundle) { return bundle.is_used || !bundle.hook.valid(); });
  order_.begin_forward(is_all_used);
}

void ActivationStore::resize_room(Bytes room) {
  own_room_ = room;
  most_room_ = std::max(most_room_.value_or(room), room);
  seen_ = {{}, stats_.saved, {}};
  set_room(room);
}

bool ActivationStore::shrink_peer(std::int32_t rank, Bytes left) {
  for (SavedId saved : forgotten_) {  // a storage keeps its place until it has left
    if (const Ticket& copy = at(saved).ticket) copy->wait_passed();
  }
  let_go_forgotten();
  if (!places_.shrink_peer(rank, left)) return false;
  // A forgotten storage may still be on its way, to a visit that the stream has not reached yet.
  if (const Ticket last = std::exchange(last_from_peers_, nullptr)) last->wait_passed();
  return true;
}

SavedId ActivationStore::save(const std::byte* memory, Bytes bytes) {
  const SavedId saved(next_id_++);
  if (free_tokens_.empty()) free_tokens_.push_back(num_tokens_++);
  const Bytes token{free_tokens_.back()};
  free_tokens_.pop_back();
  Entry entry;
  entry.token = issuer_.buffers().intern(
      {{Place::Kind::host, kSavedRegion}, token, Bytes{1}, Format::compute, Purpose::saved_tensor, UnitId()});
  entry.bytes = bytes;
  entry.forward = order_.newest();
  note_there(entry, memory);
  stats_.saved += bytes;
  stats_.most_saved = std::max(stats_.most_saved, stats_.saved);
  seen_.most_saved = std::max(seen_.most_saved, stats_.saved);
  entries_.emplace(saved, std::move(entry));
  share(saved);
  return saved;
}

void ActivationStore::take_place(Entry& entry, bool goes_home) {
  if (!entry.extents.empty()) return;
  entry.extents = places_.take(entry.bytes, goes_home);
  if (is_at_peers(entry.extents)) stats_.at_peers += entry.bytes;
  stats_.most_at_peers = std::max(stats_.most_at_peers, stats_.at_peers);
}

void ActivationStore::give_back_place(Entry& entry) {
  if (entry.extents.empty()) return;
  if (is_at_peers(entry.extents)) stats_.at_peers -= entry.bytes;
  places_.give_back(std::exchange(entry.extents, {}));
}

// ---- what is saved ----------------------------------------------------------------------------------------------

// `memory` null: it has left the device.
void ActivationStore::note_there(Entry& entry, const std::byte* memory) {
  if (entry.memory == nullptr && memory != nullptr) stats_.there += entry.bytes;
  if (entry.memory != nullptr && memory == nullptr) stats_.there -= entry.bytes;
  stats_.most_there = std::max(stats_.most_there, stats_.there);
  entry.memory = memory;
}

void ActivationStore::share(SavedId saved) {
  if (!open_) open_ = Bundle{HookId(), order_.newest(), {}, false};  // outside of visits: its backward is not foreseen
  if (at(saved).forward != order_.newest()) at(saved).forward.reset();
  if (std::find(open_->saved.begin(), open_->saved.end(), saved) == open_->saved.end()) open_->saved.push_back(saved);
}

void ActivationStore::forget(SavedId saved) {
  Entry& entry = at(saved);
  entry.is_forgotten = true;
  if (entry.ticket && !entry.ticket->passed()) forgotten_.push_back(saved);
  else let_go(saved);
}

void ActivationStore::let_go_forgotten() {
  for (SavedId saved : std::exchange(forgotten_, {})) forget(saved);
}

void ActivationStore::let_go(SavedId saved) {
  Entry& entry = at(saved);
  note_there(entry, nullptr);
  callbacks_.release_saved(saved);
  stats_.saved -= entry.bytes;
  give_back_place(entry);
  free_tokens_.push_back(static_cast<std::int32_t>(issuer_.buffers()[entry.token].offset.count));
  entries_.erase(saved);
}

// ---- visits -----------------------------------------------------------------------------------------------------

std::vector<Access> ActivationStore::enter(HookId hook, Phase phase, UnitId unit, Stream stream) {
  let_go_forgotten();
  awaited_.clear();  // of a visit that could not be opened: they are still coming
  if (std::exchange(is_inside_, true)) return {};
  if (phase == Phase::forward && !saves_) return {};
  if (phase == Phase::forward) {
    if (!open_) open_ = Bundle{hook, order_.newest(), {}, false};
    refuse_large_bundle();
    make_way(expected_of(hook), unit);
    entered_us_ = clock_us();
    return {};
  }
  end_left();
  const std::vector<Bundles::iterator> needed = use(hook);
  if (needed.empty()) return {};
  const auto used = needed.front();
  used->is_used = true;
  note_least(by_module_[hook].gap_us, clock_us() - used->left_us);
  std::erase(staying_, used);
  const std::vector<SavedId> now = alive(*used);
  tell_trace();
  reload(now, unit, stream);
  for (std::size_t ahead = 1; ahead < needed.size(); ++ahead) {
    std::vector<SavedId> next = alive(*needed[ahead]);
    std::erase_if(next, [this](SavedId saved) { return at(saved).state == State::resident; });
    Bytes bytes;
    for (SavedId saved : next) bytes += at(saved).state == State::offloaded ? at(saved).bytes : Bytes{0};
    if (!room().has_room_ahead(stats_.there, bytes)) break;
    reload(next, unit, stream);
  }
  std::vector<Access> reads;
  for (SavedId saved : now) {
    const Entry& entry = at(saved);
    reads.push_back({entry.token, issuer_.version(entry.token), Access::Mode::read});
    if (entry.state == State::reloading) awaited_.push_back(saved);
  }
  return reads;
}

// Only now do the storages count as resident: until this call a copy may write them, even if the visit's waits failed.
void ActivationStore::opened(std::int64_t at_us) {
  entered_us_ = at_us;
  for (SavedId saved : std::exchange(awaited_, {})) {
    const auto entry = entries_.find(saved);
    if (entry == entries_.end() || entry->second.state != State::reloading) continue;
    entry->second.state = State::resident;
    entry->second.ticket.reset();
  }
}

bool ActivationStore::is_alive(SavedId saved) const {
  const auto entry = entries_.find(saved);
  return entry != entries_.end() && !entry->second.is_forgotten;
}

bool ActivationStore::is_any_alive(const Bundle& bundle) const {
  return std::any_of(bundle.saved.begin(), bundle.saved.end(), [this](SavedId saved) { return is_alive(saved); });
}

std::vector<SavedId> ActivationStore::alive(const Bundle& bundle) const {
  std::vector<SavedId> found;
  std::copy_if(bundle.saved.begin(), bundle.saved.end(), std::back_inserter(found),
               [this](SavedId saved) { return is_alive(saved); });
  return found;
}

// Returns the bundle that a backward visit of this module uses, and then the next ones that are needed, at most
// kMostAhead. Returns nothing if the module has saved nothing that is alive.
std::vector<ActivationStore::Bundles::iterator> ActivationStore::use(HookId hook) {
  std::vector<Bundles::iterator> known;
  std::vector<SavedBundle> facts;
  for (auto bundle = bundles_.begin(); bundle != bundles_.end(); ++bundle) {
    known.push_back(bundle);
    facts.push_back({bundle->hook, bundle->forward, bundle->is_used});
  }
  const IsAlive is_alive = [&](std::size_t index) { return is_any_alive(*known[index]); };
  std::vector<Bundles::iterator> found;
  for (auto next = next_used(facts, hook, is_alive); next; next = needed_after(facts, *next, order_, is_alive)) {
    facts[*next].is_used = true;
    found.push_back(known[*next]);
    if (found.size() == 1 + kMostAhead) break;
  }
  return found;
}

void ActivationStore::leave(UnitId unit, Stream stream) {
  let_go_forgotten();
  is_inside_ = false;
  if (open_ && !open_->saved.empty()) {
    bundles_.push_back(std::move(*open_));
    const std::vector<SavedId> saved = alive(bundles_.back());
    mark(unit, saved, stream);
    staying_.push_back(std::prev(bundles_.end()));
    Bytes bytes;
    for (SavedId each : saved) bytes += at(each).bytes;
    stats_.largest = std::max(stats_.largest, bytes);
    seen_.largest = std::max(seen_.largest, bytes);
    Bundle& bundle = bundles_.back();
    bundle.left_us = clock_us();
    SavedByModule& module = by_module_[bundle.hook];
    ++module.num_visits;
    module.bytes = std::max(module.bytes, bytes);
    const bool is_new = seen_.modules.insert(bundle.hook).second;
    module.expected = is_new ? bytes : std::max(module.expected, bytes);
    note_least(module.forward_us, bundle.left_us - entered_us_);
  } else if (open_ && saves_) {
    SavedByModule& module = by_module_[open_->hook];
    if (seen_.modules.insert(open_->hook).second) module.expected = Bytes{0};  // it saves nothing
  }
  open_.reset();
  end_left();
  tell_trace();
  if (!saves_) return;
  offload_until(Bytes{0}, room().may_stay(seen_.most_saved), unit);
}

void ActivationStore::tell_trace() const {
  if (!trace_) return;
  const Bytes lent = own_room_ ? *own_room_ - *room_ : Bytes{0};
  trace_->sample(SavedMemory{trace_->now_us(), stats_.there, stats_.at_peers, held(), lent});
}

// A block is expected to save as much as other blocks, until its own size is known.
Bytes ActivationStore::expected_of(HookId hook) const {
  const auto known = by_module_.find(hook);
  return known == by_module_.end() ? seen_.largest : known->second.expected;
}

void ActivationStore::refuse_large_bundle() const {
  const Bytes least = SavedRoom{own_room_, seen_.largest}.least();
  if (!most_room_ || least <= *most_room_) return;
  throw UsageError("activation_memory for what two blocks save, " + to_string(least) + " (" +
                       std::to_string(least.count) + " bytes)",
                   to_string(*most_room_) + " (" + std::to_string(most_room_->count) + " bytes)",
                   "raise it, make the blocks smaller, or say activations=\"recompute\"");
}

}  // namespace noria
