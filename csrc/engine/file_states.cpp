#include "engine/file_states.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace noria {

FileStates::FileStates(const FileStatesOptions& options, Issuer& issuer, const UnitTable& units)
    : home_(options.home),
      issuer_(issuer),
      records_(units.size(), -1),
      slots_of_(units.size(), -1),
      slots_(static_cast<std::size_t>(home_->num_slots())),
      num_planned_(home_->num_slots()),
      most_postponed_(options.most_postponed),
      writes_(units.size()),
      read_(Lane::read, home_->store().pace(), ledger_),
      write_(Lane::write, home_->store().pace(), ledger_) {
  NORIA_INVARIANT(options.records.size() == units.size(), "each unit has a record, or -1");
  std::deque<UnitId> descending;
  for (UnitId unit : units.ids()) {
    records_[unit] = options.records[static_cast<std::size_t>(unit.value)];
    if (has(unit)) descending.push_front(unit);
  }
  std::deque<UnitId> postponed;
  int number = 0;
  for (UnitId unit : descending) {  // a backward mostly begins with the last unit
    if (postpones(number++)) postponed.push_front(unit);
    else expected_.push_back(unit);
  }
  expected_.insert(expected_.end(), postponed.begin(), postponed.end());
}

// A slot counts only if its read has not failed.
std::optional<int> FileStates::slot_of(UnitId unit) const {
  const int slot = slots_of_[unit];
  if (slot < 0) return std::nullopt;
  return why_failed(slots_[static_cast<std::size_t>(slot)].read).empty() ? std::optional(slot) : std::nullopt;
}

void FileStates::bring(UnitId unit) {
  if (const auto slot = slot_of(unit)) {
    slots_[static_cast<std::size_t>(*slot)].used = ++now_;
    return;
  }
  if (slots_of_[unit] >= 0) forget(slots_of_[unit]);
  const int number = free_slot();
  Slot& slot = slots_[static_cast<std::size_t>(number)];
  Op op;
  op.lane = Lane::read;
  op.verb = Verb::read_state;
  op.unit = unit;
  op.accesses = {access_to(record_buffer(unit), Access::Mode::read),
                 access_to(slot_buffer(number), Access::Mode::write)};
  const int record = records_[unit];
  slot = {unit, nullptr, false, false, ++now_};
  slots_of_[unit] = number;
  slot.read = submit(read_, std::move(op), home_->bytes_of(record),
                     [home = home_, record, number] { home->bring(record, number, false); });
}

Access FileStates::access(UnitId unit) {
  NORIA_INVARIANT(slots_of_[unit] >= 0, "the state of a unit has been brought before an op uses it");
  return access_to(slot_buffer(slots_of_[unit]), Access::Mode::write);
}

void FileStates::put_back(UnitId unit) { put_back(slots_of_[unit]); }

void FileStates::put_back(int number) {
  Slot& slot = slots_[static_cast<std::size_t>(number)];
  slot.is_changed = false;
  Op op;
  op.lane = Lane::write;
  op.verb = Verb::write_state;
  op.unit = slot.unit;
  op.accesses = {access_to(slot_buffer(number), Access::Mode::read),
                 access_to(record_buffer(slot.unit), Access::Mode::write)};
  const int record = records_[slot.unit];
  std::vector<Ticket>& writes = writes_[slot.unit];
  std::erase_if(writes, [](const Ticket& each) { return each->passed() && why_failed(each).empty(); });
  writes.push_back(submit(write_, std::move(op), home_->bytes_of(record),
                          [home = home_, record, number] { home->put_back(record, number); }));
}

void FileStates::note_used(UnitId unit) {
  const bool was_ahead = ahead_.erase(unit) > 0;
  if (!was_ahead) std::erase(expected_, unit);
  expected_.push_back(unit);
  ++num_used_;
  // A unit that was brought ahead is usually used within `num_planned_` updates. If twice as many have passed, this
  // step leaves it out.
  std::erase_if(ahead_, [&](const auto& each) { return num_used_ - each.second > 2 * num_planned_; });
  // If this unit was not expected, the next one may not be, either: it finds a slot.
  bring_ahead(was_ahead ? 0 : 1);
}

void FileStates::bring_ahead(int left) {
  auto free =
      std::ranges::count_if(slots_, [&](const Slot& slot) { return !slot.is_held && !ahead_.contains(slot.unit); });
  for (; free > left && !expected_.empty(); --free) {
    const UnitId next = expected_.front();
    expected_.pop_front();
    bring(next);
    ahead_[next] = num_used_;
  }
}

void FileStates::hold(UnitId unit) { slots_[static_cast<std::size_t>(slots_of_[unit])].is_held = true; }

void FileStates::note_changed(UnitId unit) { slots_[static_cast<std::size_t>(slots_of_[unit])].is_changed = true; }

void FileStates::release() {
  for (Slot& slot : slots_) slot.is_held = false;
  if (home_->num_slots() == num_planned_) return;
  for (int number = num_planned_; number < home_->num_slots(); ++number) {
    const Slot& slot = slots_[static_cast<std::size_t>(number)];
    if (slot.unit.valid() && slot.is_changed && slot_of(slot.unit)) put_back(number);
  }
  idle();
  for (int number = num_planned_; number < home_->num_slots(); ++number) forget(number);
  slots_.resize(static_cast<std::size_t>(num_planned_));
  home_->drop_slots(num_planned_);
}

void FileStates::bring_blank(UnitId unit) {
  idle();
  if (slots_of_[unit] < 0) bring(unit);
  idle();
  const int number = slots_of_[unit];
  home_->bring(records_[unit], number, true);
  Slot& slot = slots_[static_cast<std::size_t>(number)];
  slot.read = nullptr;
  slot.is_changed = true;
}

int FileStates::free_slot() {
  int found = -1;
  // What was brought ahead is needed soon, so such slots come last. Of these the one that was brought last comes first.
  const auto key_of = [&](int number) {
    const Slot& slot = slots_[static_cast<std::size_t>(number)];
    const bool is_ahead = ahead_.contains(slot.unit);
    return std::pair(is_ahead, is_ahead ? -slot.used : slot.used);
  };
  for (int number = 0; number < static_cast<int>(slots_.size()); ++number) {
    const Slot& slot = slots_[static_cast<std::size_t>(number)];
    if (!slot.unit.valid()) return number;
    if (!slot.is_held && (found < 0 || key_of(number) < key_of(found))) found = number;
  }
  if (found < 0) {
    home_->add_slot();
    slots_.emplace_back();
    return static_cast<int>(slots_.size()) - 1;
  }
  const Slot& slot = slots_[static_cast<std::size_t>(found)];
  if (slot.is_changed && slot_of(slot.unit)) put_back(found);
  forget(found);
  return found;
}

void FileStates::forget(int number) {
  Slot& slot = slots_[static_cast<std::size_t>(number)];
  if (slot.unit.valid()) slots_of_[slot.unit] = -1;
  if (ahead_.erase(slot.unit) > 0) expected_.push_front(slot.unit);
  slot = {};
}

Ticket FileStates::submit(TimedLane& lane, Op op, Bytes bytes, std::function<void()> work) {
  op.bytes = bytes;
  auto begun = issuer_.begin(op);
  const std::int64_t least_ns = home_->store().pace()->least_ns(op.lane, bytes);
  // What is read is checked by itself, so a read waits only for memory, and until the file is written.
  const bool needs_success = op.lane != Lane::read;
  Ticket ticket = lane.submit({begun.label, std::move(begun.waits), bytes, least_ns, std::move(work), needs_success});
  issuer_.keep(op.id, ticket);
  return ticket;
}

BufferId FileStates::record_buffer(UnitId unit) {
  const Place place{Place::Kind::file, 0};
  const int record = records_[unit];
  return issuer_.buffers().intern(
      {place, home_->offset_of(record), home_->bytes_of(record), Format::master, Purpose::record, unit});
}

BufferId FileStates::slot_buffer(int slot) {
  const Place place{Place::Kind::host, kStateSlotsRegion};
  return issuer_.buffers().intern({place, Bytes{slot}, Bytes{1}, Format::master, Purpose::state_slot, UnitId()});
}

Access FileStates::access_to(BufferId buffer, Access::Mode mode) {
  const bool writes = mode == Access::Mode::write;
  return {buffer, writes ? issuer_.next_version(buffer) : issuer_.version(buffer), mode};
}

std::string FileStates::torn(UnitId unit) const {
  for (const Ticket& write : writes_[unit]) {
    if (std::string why = why_failed(write); !why.empty()) return why;
  }
  return {};
}

void FileStates::clear_torn() {
  idle();
  writes_.fill({});
}

void FileStates::idle() {
  write_.idle();
  read_.idle();
  write_.idle();
}

void FileStates::close() {
  read_.close();
  write_.close();
}

}  // namespace noria
