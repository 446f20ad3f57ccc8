#include "engine/saver.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/errors.h"
#include "engine/unit.h"

namespace noria {
namespace {

constexpr std::size_t kMostStaying = 1;  // bundles that are complete and have not been sent out
constexpr std::size_t kMostLeaving = 2;  // bundles whose copies are under way

}  // namespace

void Saver::begin_pass(Phase phase) {
  is_inside_ = false;
  if (phase == Phase::backward) return;
  ++forward_;
  open_.reset();
  for (auto bundle = bundles_.begin(); bundle != bundles_.end();) {
    if (is_any_alive(*bundle)) {
      ++bundle;
      continue;
    }
    std::erase(staying_, bundle);
    bundle = bundles_.erase(bundle);
  }
}

std::optional<SavedId> Saver::save(const std::byte* memory, Bytes bytes) {
  const auto range = pool_.take(bytes);
  if (!range) return std::nullopt;
  const SavedId saved(next_id_++);
  if (free_tokens_.empty()) free_tokens_.push_back(num_tokens_++);
  const Bytes token{free_tokens_.back()};
  free_tokens_.pop_back();
  Entry entry;
  entry.range = *range;
  entry.copy = issuer_.buffers().intern({{Place::Kind::host, kSavedCopiesRegion},
                                         range->offset,
                                         range->bytes,
                                         Format::compute,
                                         Purpose::saved_copy,
                                         UnitId()});
  entry.token = issuer_.buffers().intern(
      {{Place::Kind::host, kSavedRegion}, token, Bytes{1}, Format::compute, Purpose::saved_tensor, UnitId()});
  entry.bytes = bytes;
  note_there(entry, memory);
  entries_.emplace(saved, std::move(entry));
  share(saved);
  return saved;
}

// `memory` null: it has left.
void Saver::note_there(Entry& entry, const std::byte* memory) {
  if (entry.memory == nullptr && memory != nullptr) stats_.there += entry.bytes;
  if (entry.memory != nullptr && memory == nullptr) stats_.there -= entry.bytes;
  stats_.most_there = std::max(stats_.most_there, stats_.there);
  entry.memory = memory;
}

void Saver::share(SavedId saved) {
  if (!open_) open_ = Bundle{HookId(), forward_, {}, false};  // outside of visits: nobody foresees who needs it
  if (std::find(open_->saved.begin(), open_->saved.end(), saved) == open_->saved.end()) open_->saved.push_back(saved);
}

void Saver::forget(SavedId saved) {
  Entry& entry = at(saved);
  entry.is_forgotten = true;
  if (entry.ticket && !entry.ticket->passed()) forgotten_.push_back(saved);
  else let_go(saved);
}

void Saver::let_go_forgotten() {
  for (SavedId saved : std::exchange(forgotten_, {})) forget(saved);
}

void Saver::let_go(SavedId saved) {
  Entry& entry = at(saved);
  note_there(entry, nullptr);
  custodian_.left(saved);
  pool_.give_back(entry.range);
  free_tokens_.push_back(static_cast<std::int32_t>(issuer_.buffers()[entry.token].offset.count));
  entries_.erase(saved);
}

std::vector<Access> Saver::enter(HookId hook, Phase phase, UnitId unit, Stream stream) {
  let_go_forgotten();
  if (std::exchange(is_inside_, true)) return {};
  if (phase == Phase::forward) {
    if (!open_) open_ = Bundle{hook, forward_, {}, false};
    return {};
  }
  const auto used = next_used(hook);
  if (used == bundles_.end()) return {};
  used->is_used = true;
  std::erase(staying_, used);
  const std::vector<SavedId> now = alive(*used);
  std::vector<SavedId> wanted = now;
  if (used != bundles_.begin() && std::prev(used)->forward == used->forward && !std::prev(used)->is_used) {
    const std::vector<SavedId> next = alive(*std::prev(used));
    wanted.insert(wanted.end(), next.begin(), next.end());
  }
  reload(wanted, unit, stream);
  std::vector<Access> reads;
  for (SavedId saved : now) {
    Entry& entry = at(saved);
    reads.push_back({entry.token, issuer_.version(entry.token), Access::Mode::read});
    if (entry.state != State::coming) continue;
    entry.state = State::there;  // for whoever comes after that visit's waits
    entry.ticket.reset();
  }
  return reads;
}

bool Saver::is_alive(SavedId saved) const {
  const auto entry = entries_.find(saved);
  return entry != entries_.end() && !entry->second.is_forgotten;
}

bool Saver::is_any_alive(const Bundle& bundle) const {
  return std::any_of(bundle.saved.begin(), bundle.saved.end(), [this](SavedId saved) { return is_alive(saved); });
}

std::vector<SavedId> Saver::alive(const Bundle& bundle) const {
  std::vector<SavedId> found;
  std::copy_if(bundle.saved.begin(), bundle.saved.end(), std::back_inserter(found),
               [this](SavedId saved) { return is_alive(saved); });
  return found;
}

Saver::Bundles::iterator Saver::next_used(HookId hook) {
  auto found = bundles_.end();
  for (auto bundle = bundles_.begin(); bundle != bundles_.end(); ++bundle) {
    if (bundle->hook != hook || bundle->is_used || !is_any_alive(*bundle)) continue;
    if (found != bundles_.end() && found->forward != bundle->forward) break;
    found = bundle;
  }
  return found;
}

void Saver::leave(UnitId unit, Stream stream) {
  let_go_forgotten();
  is_inside_ = false;
  if (open_ && !open_->saved.empty()) {
    bundles_.push_back(std::move(*open_));
    mark(unit, alive(bundles_.back()), stream);
    staying_.push_back(std::prev(bundles_.end()));
  }
  open_.reset();
  for (; staying_.size() > kMostStaying; staying_.pop_front()) offload(*staying_.front(), unit);
  await_leaving(kMostLeaving, unit);
}

void Saver::await(SavedId saved, Stream stream) {
  Entry& entry = at(saved);
  entry.is_wanted = true;
  if (entry.state == State::there || entry.state == State::leaving) return;
  ++stats_.num_unforeseen;
  if (entry.state == State::coming) {
    backend_.wait({entry.ticket}, stream, {OpId(), Lane::compute, Verb::backward, UnitId()});
    entry.ticket->wait_passed();
    entry.ticket.reset();
  } else {
    note_there(entry, custodian_.make_room(saved, entry.bytes));
    custodian_.fill(saved, entry.range.memory, entry.bytes);
    ++stats_.num_reloaded;
    stats_.reloaded += entry.bytes;
  }
  entry.state = State::there;
}

// What is in the memory of these is there on the stream from here on; or, before a reload, nobody uses it any more.
void Saver::mark(UnitId unit, const std::vector<SavedId>& saved, Stream stream) {
  Op op;
  op.lane = Lane::compute;
  op.verb = Verb::save;
  op.unit = unit;
  for (SavedId each : saved) {
    Entry& entry = at(each);
    if (std::exchange(entry.is_marked, true) && entry.state != State::away) continue;  // another bundle's too
    op.accesses.push_back({entry.token, issuer_.next_version(entry.token), Access::Mode::write});
  }
  issuer_.pass(std::move(op), stream);
}

void Saver::offload(const Bundle& bundle, UnitId unit) {
  Op op;
  op.lane = Lane::drain;
  op.verb = Verb::offload;
  op.unit = unit;
  Transfer transfer;
  std::vector<SavedId> going;
  for (SavedId saved : alive(bundle)) {
    Entry& entry = at(saved);
    if (entry.state != State::there || entry.is_wanted) continue;
    going.push_back(saved);
    transfer.copies.push_back({entry.range.memory, entry.memory, entry.bytes});
    op.bytes += entry.bytes;
    op.accesses.push_back({entry.token, issuer_.version(entry.token), Access::Mode::read});
    op.accesses.push_back({entry.copy, issuer_.next_version(entry.copy), Access::Mode::write});
  }
  if (going.empty()) return;
  stats_.num_offloaded += static_cast<std::int64_t>(going.size());
  stats_.offloaded += op.bytes;
  const Ticket ticket = issuer_.submit(std::move(op), std::move(transfer));
  for (SavedId saved : going) {
    at(saved).state = State::leaving;
    at(saved).ticket = ticket;
  }
  leaving_.push_back(std::move(going));
}

void Saver::await_leaving(std::size_t most, UnitId unit) {
  for (; !leaving_.empty(); leaving_.pop_front()) {
    const std::vector<SavedId>& front = leaving_.front();
    const auto one = std::find_if(front.begin(), front.end(), [&](SavedId saved) { return entries_.contains(saved); });
    if (one != front.end()) {
      const Ticket ticket = at(*one).ticket;
      if (leaving_.size() <= most && !ticket->passed()) return;
      backend_.wait({ticket}, nullptr, {OpId(), Lane::compute, Verb::save, unit});
    }
    for (SavedId saved : front) {
      if (entries_.contains(saved)) end_copy(saved);
    }
  }
}

void Saver::end_copy(SavedId saved) {
  Entry& entry = at(saved);
  entry.ticket.reset();
  entry.state = entry.is_wanted ? State::there : State::away;
  if (entry.is_wanted || entry.is_forgotten) return;
  note_there(entry, nullptr);
  custodian_.left(saved);
}

void Saver::reload(const std::vector<SavedId>& wanted, UnitId unit, Stream stream) {
  await_leaving(leaving_.size(), unit);
  std::vector<SavedId> coming;
  for (SavedId saved : wanted) {
    at(saved).is_wanted = true;
    const bool is_twice = std::find(coming.begin(), coming.end(), saved) != coming.end();
    if (at(saved).state == State::away && !is_twice) coming.push_back(saved);
  }
  if (coming.empty()) return;
  Op op;
  op.lane = Lane::fetch;
  op.verb = Verb::reload;
  op.unit = unit;
  Transfer transfer;
  for (SavedId saved : coming) {
    Entry& entry = at(saved);
    std::byte* const memory = custodian_.make_room(saved, entry.bytes);
    note_there(entry, memory);
    transfer.copies.push_back({memory, entry.range.memory, entry.bytes});
    op.bytes += entry.bytes;
  }
  mark(unit, coming, stream);  // that memory may have been somebody else's until now
  for (SavedId saved : coming) {
    Entry& entry = at(saved);
    op.accesses.push_back({entry.copy, issuer_.version(entry.copy), Access::Mode::read});
    op.accesses.push_back({entry.token, issuer_.next_version(entry.token), Access::Mode::write});
  }
  stats_.num_reloaded += static_cast<std::int64_t>(coming.size());
  stats_.reloaded += op.bytes;
  const Ticket ticket = issuer_.submit(std::move(op), std::move(transfer));
  for (SavedId saved : coming) {
    at(saved).state = State::coming;
    at(saved).ticket = ticket;
  }
}

}  // namespace noria
