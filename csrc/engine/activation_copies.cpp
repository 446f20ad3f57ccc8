// ActivationStore, second part: what forwards save leaves the device and comes back.
#include "engine/activation_store.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"

namespace noria {

// ---- out and back -----------------------------------------------------------------------------------------------

Bytes ActivationStore::leaving_bytes() const {
  Bytes bytes;
  for (const PendingOffload& load : leaving_) {
    for (SavedId saved : load.saved) {
      const auto entry = entries_.find(saved);
      if (entry != entries_.end() && !entry->second.is_wanted) bytes += entry->second.bytes;
    }
  }
  return bytes;
}

// Makes room for `bytes` more on the device.
void ActivationStore::make_way(Bytes bytes, UnitId unit) {
  offload_until(bytes, room().most(), unit);
  end_left();
  while (!leaving_.empty() && stats_.there + bytes > room().most()) {
    await_leaving(unit);
    let_go_forgotten();
  }
}

// Offloads bundles until `room` holds what stays and `more`.
void ActivationStore::offload_until(Bytes more, Bytes room, UnitId unit) {
  while (staying_.size() > kLeastStaying) {
    const Bytes least = bytes_to_leave(stats_.there, leaving_bytes(), more, room);
    if (least == Bytes{0}) break;
    offload_farthest(least, unit);
  }
}

void ActivationStore::offload_farthest(Bytes least, UnitId unit) {
  std::vector<std::int64_t> forwards;
  for (const auto& bundle : staying_) forwards.push_back(bundle->forward);
  const auto leaves = staying_.begin() + static_cast<std::ptrdiff_t>(farthest(forwards, order_));
  const Bundle& bundle = **leaves;
  const std::vector<SavedId> all = idle(bundle);
  std::vector<Bytes> sizes;
  for (SavedId saved : all) sizes.push_back(at(saved).bytes);
  std::vector<SavedId> going;
  for (std::size_t index : enough(sizes, least)) going.push_back(all[index]);
  offload(going, sent_home_.contains(bundle.hook), unit);
  if (going.size() == all.size()) staying_.erase(leaves);
}

std::vector<SavedId> ActivationStore::idle(const Bundle& bundle) const {
  std::vector<SavedId> found = alive(bundle);
  std::erase_if(found, [this](SavedId saved) {
    const Entry& entry = entries_.at(saved);
    return entry.state != State::resident || entry.is_wanted;
  });
  return found;
}

void ActivationStore::await(SavedId saved, Stream stream) {
  Entry& entry = at(saved);
  entry.is_wanted = true;
  if (entry.forward) order_.note_backward(*entry.forward);
  if (entry.state == State::resident || entry.state == State::offloading) return;
  ++stats_.num_unforeseen;
  std::vector<SavedId> coming;
  if (entry.state == State::offloaded && is_at_peers(entry.extents)) coming = want({saved}, UnitId());
  const std::int64_t since_us = clock_us();
  if (!coming.empty()) {
    await_stream(stream);
    bring(coming, UnitId());
  }
  if (entry.state == State::reloading) {
    backend_.wait({entry.ticket}, stream, {OpId(), Lane::compute, Verb::backward, UnitId()});
    entry.ticket->wait_passed();
    entry.ticket.reset();
  } else {
    note_there(entry, callbacks_.make_room(saved, entry.bytes));
    callbacks_.fill(saved, entry.extents.front().memory, entry.bytes);
    give_back_place(entry);
    ++stats_.num_reloaded;
    stats_.reloaded += entry.bytes;
  }
  entry.state = State::resident;
  waited_us_ += clock_us() - since_us;
}

void ActivationStore::await_stream(Stream stream) {
  const Ticket now = backend_.open({OpId(), Lane::compute, Verb::user, UnitId()});
  backend_.give(now, stream);
  now->wait_passed();
}

// Marks that the stream has written these storages or, before a reload, that no op uses their new memory any more.
void ActivationStore::mark(UnitId unit, const std::vector<SavedId>& saved, Stream stream) {
  Op op;
  op.lane = Lane::compute;
  op.verb = Verb::save;
  op.unit = unit;
  for (SavedId each : saved) {
    Entry& entry = at(each);
    if (std::exchange(entry.is_marked, true) && entry.state != State::offloaded) continue;  // another bundle has it too
    op.accesses.push_back({entry.token, issuer_.next_version(entry.token), Access::Mode::write});
  }
  issuer_.pass(std::move(op), stream);
}

Ticket ActivationStore::submit(TransferBatch load, Lane lane, Verb verb, UnitId unit) {
  load.op.lane = lane;
  load.op.verb = verb;
  load.op.unit = unit;
  load.op.bytes = load.transfer.bytes();
  return issuer_.submit(std::move(load.op), std::move(load.transfer));
}

void ActivationStore::offload(const std::vector<SavedId>& going, bool go_home, UnitId unit) {
  for (SavedId saved : going) take_place(at(saved), go_home);  // may run Python code
  TransferBatch to_home, to_peers;
  for (SavedId saved : going) {
    Entry& entry = at(saved);
    TransferBatch& load = is_at_peers(entry.extents) ? to_peers : to_home;
    load.saved.push_back(saved);
    load.op.accesses.push_back({entry.token, issuer_.version(entry.token), Access::Mode::read});
    for (const Extent& extent : entry.extents) {
      load.transfer.copies.push_back({extent.memory, entry.memory + extent.begin.count, extent.bytes, extent.link});
      load.op.accesses.push_back({extent.copy, issuer_.next_version(extent.copy), Access::Mode::write});
    }
  }
  for (TransferBatch* load : {&to_home, &to_peers}) {
    if (load->saved.empty()) continue;
    const bool is_to_peers = load == &to_peers;
    const Bytes bytes = load->transfer.bytes();
    std::vector<SavedId> saved = load->saved;
    const Ticket ticket = submit(std::move(*load), is_to_peers ? Lane::peer : Lane::drain, Verb::offload, unit);
    for (SavedId each : saved) {
      at(each).state = State::offloading;
      at(each).ticket = ticket;
    }
    stats_.num_offloaded += static_cast<std::int64_t>(saved.size());
    stats_.offloaded += bytes;
    if (is_to_peers) stats_.offloaded_to_peers += bytes;
    leaving_.push_back({std::move(saved), ticket});
  }
}

// Waits for the offload that was issued first.
void ActivationStore::await_leaving(UnitId unit) {
  const std::int64_t since_us = clock_us();
  backend_.wait({leaving_.front().ticket}, Stream(), {OpId(), Lane::compute, Verb::save, unit});
  waited_us_ += clock_us() - since_us;
  end_left();
}

void ActivationStore::end_left() {
  for (auto load = leaving_.begin(); load != leaving_.end();) {
    if (!load->ticket->passed()) {
      ++load;
      continue;
    }
    PendingOffload left = std::move(*load);
    load = leaving_.erase(load);
    std::erase_if(left.saved, [this](SavedId saved) { return !entries_.contains(saved); });
    try {
      left.ticket->wait_passed();
    } catch (...) {  // the copy failed: it has not left
      for (SavedId saved : left.saved) at(saved).is_wanted = true;
      for (SavedId saved : left.saved) end_copy(saved);
      throw;
    }
    for (SavedId saved : left.saved) end_copy(saved);
  }
}

void ActivationStore::end_copy(SavedId saved) {
  Entry& entry = at(saved);
  entry.ticket.reset();
  entry.state = entry.is_wanted ? State::resident : State::offloaded;
  if (entry.is_wanted) give_back_place(entry);
  if (entry.is_wanted || entry.is_forgotten) return;
  note_there(entry, nullptr);
  callbacks_.release_saved(saved);
}

void ActivationStore::reload(const std::vector<SavedId>& wanted, UnitId unit, Stream stream) {
  const std::vector<SavedId> coming = want(wanted, unit);
  if (coming.empty()) return;
  mark(unit, coming, stream);  // another tensor may have used that memory until now
  bring(coming, unit);
}

std::vector<SavedId> ActivationStore::want(const std::vector<SavedId>& wanted, UnitId unit) {
  std::vector<SavedId> coming;
  Bytes bytes;
  for (SavedId saved : wanted) {
    Entry& entry = at(saved);
    entry.is_wanted = true;
    if (entry.state != State::offloaded) continue;
    coming.push_back(saved);
    bytes += entry.bytes;
  }
  if (coming.empty()) return coming;
  make_way(bytes, unit);
  for (SavedId saved : coming) note_there(at(saved), callbacks_.make_room(saved, at(saved).bytes));
  return coming;
}

void ActivationStore::bring(const std::vector<SavedId>& coming, UnitId unit) {
  TransferBatch from_home, from_peers;
  for (SavedId saved : coming) {
    Entry& entry = at(saved);
    TransferBatch& load = is_at_peers(entry.extents) ? from_peers : from_home;
    load.saved.push_back(saved);
    for (const Extent& extent : entry.extents) {
      load.transfer.copies.push_back(
          {const_cast<std::byte*>(entry.memory) + extent.begin.count, extent.memory, extent.bytes, extent.link});
      load.op.accesses.push_back({extent.copy, issuer_.version(extent.copy), Access::Mode::read});
    }
    load.op.accesses.push_back({entry.token, issuer_.next_version(entry.token), Access::Mode::write});
  }
  for (TransferBatch* load : {&from_home, &from_peers}) {
    if (load->saved.empty()) continue;
    const bool is_from_peers = load == &from_peers;
    const Bytes loaded = load->transfer.bytes();
    const std::vector<SavedId> saved = load->saved;
    const Ticket ticket = submit(std::move(*load), is_from_peers ? Lane::peer : Lane::fetch, Verb::reload, unit);
    if (is_from_peers) last_from_peers_ = ticket;
    for (SavedId each : saved) {
      at(each).state = State::reloading;
      at(each).ticket = ticket;
      // Peers have little memory, and the op that writes it next stands on the same lane. The home has more memory, and
      // the fetch lane may stand behind fetches: the next op to use the place would wait for those.
      if (is_from_peers) give_back_place(at(each));
    }
    stats_.num_reloaded += static_cast<std::int64_t>(saved.size());
    stats_.reloaded += loaded;
    if (is_from_peers) stats_.reloaded_from_peers += loaded;
  }
}

}  // namespace noria
