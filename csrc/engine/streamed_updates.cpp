#include "engine/streamed_updates.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace noria {

void StreamedUpdates::set_slots(std::byte* memory, Bytes bytes_of_one, int num_slots) {
  NORIA_INVARIANT(expected_.empty() && ahead_.empty(), "slots change while updates are expected");
  slots_ = memory;
  slot_bytes_ = bytes_of_one;
  free_.clear();
  for (int slot = 0; slot < num_slots; ++slot) free_.push_back(slot);
}

void StreamedUpdates::expect(UnitId unit) {
  for (std::size_t piece = 0; piece < pieces_[unit].size(); ++piece) expected_.emplace_back(unit, piece);
}

void StreamedUpdates::fetch_ahead() {
  while (!free_.empty() && !expected_.empty()) {
    const auto [unit, piece] = expected_.front();
    fetch({unit, piece, free_.front()});
    expected_.pop_front();
    free_.pop_front();
  }
}

void StreamedUpdates::run(UnitId unit, bool reads_scales,
                          const std::function<void(const std::string& why)>& broke_off) {
  NORIA_INVARIANT(slots_ != nullptr, "an update on the device has no memory there");
  drains_[unit].clear();
  put_first(unit);
  for (std::size_t piece = 0; piece < pieces_[unit].size(); ++piece) {
    const Ahead taken = [&] {
      try {
        return take(unit, piece);
      } catch (const std::exception& error) {
        drop(unit);
        broke_off(error.what());
        throw;
      }
    }();
    fetch_ahead();
    Op op;
    op.lane = Lane::compute;
    op.verb = Verb::update;
    op.unit = unit;
    op.accesses = {slot_of(taken, Access::Mode::write)};
    if (reads_scales) {
      const BufferId scales = parts_.units[unit].scales;
      op.accesses.push_back({scales, parts_.issuer.version(scales), Access::Mode::read});
    }
    const Stream stream = parts_.callbacks.current_stream();
    compute_.continue_on(stream);
    std::exception_ptr failure;  // of the update, or of what it waits for
    bool has_run = false;
    const std::optional<Now> before = std::exchange(now_, Now{piece, memory_of(taken)});
    try {
      compute_.interrupt(std::move(op), stream, [&] {
        has_run = true;
        try {
          update_(unit);
        } catch (...) {  // the caller hears of it; ops that wait for this one do not
          failure = std::current_exception();
        }
      });
    } catch (const std::exception& error) {
      failure = std::current_exception();
      broke_off(error.what());
    }
    now_ = before;
    if (has_run) drain(taken);  // also what an update has done before it threw
    else free_.push_back(taken.slot);
    if (failure) {
      drop(unit);
      std::rethrow_exception(failure);
    }
  }
}

const StreamedUpdates::Now& StreamedUpdates::now() const {
  NORIA_INVARIANT(now_.has_value(), "no update runs on the device now");
  return *now_;
}

void StreamedUpdates::put_first(UnitId unit) {
  std::stable_partition(expected_.begin(), expected_.end(), [&](const auto& each) { return each.first == unit; });
}

// Returns the piece in its slot, fetched. If other units' pieces have all slots, the last of them gives its own up.
StreamedUpdates::Ahead StreamedUpdates::take(UnitId unit, std::size_t piece) {
  const auto is_it = [&](const Ahead& each) { return each.unit == unit && each.piece == piece; };
  const auto found = std::find_if(ahead_.begin(), ahead_.end(), is_it);
  if (found != ahead_.end()) {
    const Ahead taken = *found;
    ahead_.erase(found);
    return taken;
  }
  std::erase(expected_, std::pair(unit, piece));
  if (free_.empty()) {
    NORIA_INVARIANT(!ahead_.empty(), "an update on the device needs a slot while all are in use");
    const Ahead last = ahead_.back();
    ahead_.pop_back();
    expected_.emplace_front(last.unit, last.piece);
    free_.push_back(last.slot);
    put_first(unit);
  }
  fetch({unit, piece, free_.front()});
  free_.pop_front();
  const Ahead taken = ahead_.back();
  ahead_.pop_back();
  return taken;
}

void StreamedUpdates::fetch(Ahead ahead) {
  copy(ahead, Way::comes);
  ahead_.push_back(ahead);
}

void StreamedUpdates::drain(const Ahead& done) {
  drains_[done.unit].push_back(copy(done, Way::goes));
  parts_.issuer.poison(done.unit, slot_of(done, Access::Mode::write), memory_of(done), slot_bytes_);
  free_.push_back(done.slot);
}

Ticket StreamedUpdates::copy(const Ahead& ahead, Way way) {
  const bool comes = way == Way::comes;
  const Piece& piece = pieces_[ahead.unit][ahead.piece];
  Op op;
  op.lane = comes ? Lane::fetch : Lane::drain;
  op.verb = comes ? Verb::fetch_state : Verb::drain_state;
  op.unit = ahead.unit;
  op.accesses = home_of(ahead, comes ? Access::Mode::read : Access::Mode::write);
  op.accesses.push_back(slot_of(ahead, comes ? Access::Mode::write : Access::Mode::read));
  Transfer transfer;
  for (const Copy& each : comes ? piece.comes : piece.goes) {
    std::byte* const there = memory_of(ahead) + each.at.count;
    transfer.copies.push_back({comes ? there : each.home, comes ? each.home : there, each.bytes});
  }
  op.bytes = transfer.bytes();
  (comes ? come_ : gone_) += op.bytes;
  return parts_.issuer.submit(std::move(op), std::move(transfer));
}

// The unit's other pieces are not updated.
void StreamedUpdates::drop(UnitId unit) {
  std::erase_if(expected_, [&](const auto& each) { return each.first == unit; });
  std::erase_if(ahead_, [&](const Ahead& each) {
    if (each.unit == unit) free_.push_back(each.slot);
    return each.unit == unit;
  });
}

// Reads or writes: working copy and state of the piece. A fetch reads the held gradients too.
std::vector<Access> StreamedUpdates::home_of(const Ahead& piece, Access::Mode mode) const {
  const UnitFacts& facts = parts_.units[piece.unit].facts;
  const Piece& of = pieces_[piece.unit][piece.piece];
  std::vector<Access> accesses;
  const auto add = [&](BufferId whole) {
    Buffer part = parts_.buffers[whole];
    part.offset += of.begin;
    part.bytes = of.end - of.begin;
    accesses.push_back(access_to(part, mode));
  };
  add(facts.working);
  add(facts.state);
  if (mode == Access::Mode::read) add(facts.held);
  return accesses;
}

Access StreamedUpdates::slot_of(const Ahead& piece, Access::Mode mode) const {
  const Place slots{Place::Kind::host, kUpdateSlotsRegion};
  const Bytes at = slot_bytes_ * piece.slot;
  return access_to({slots, at, slot_bytes_, Format::compute, Purpose::update_slot, UnitId()}, mode);
}

Access StreamedUpdates::access_to(const Buffer& of, Access::Mode mode) const {
  const BufferId buffer = parts_.buffers.intern(of);
  const bool writes = mode == Access::Mode::write;
  return {buffer, writes ? parts_.issuer.next_version(buffer) : parts_.issuer.version(buffer), mode};
}

std::byte* StreamedUpdates::memory_of(const Ahead& piece) const { return slots_ + (slot_bytes_ * piece.slot).count; }

std::string StreamedUpdates::torn(UnitId unit) const {
  for (const Ticket& drain : drains_[unit]) {
    if (!drain->passed()) continue;
    try {
      drain->wait_passed();
    } catch (const std::exception& error) {
      return error.what();
    }
  }
  return {};
}

}  // namespace noria
