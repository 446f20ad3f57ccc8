#include "engine/file_weights.h"

#include <utility>

#include "base/errors.h"

namespace noria {

FileWeights::FileWeights(FileWeightsOptions options, Issuer& issuer, const UnitTable& units)
    : options_(std::move(options)),
      issuer_(issuer),
      records_(units.size(), -1),
      slots_(static_cast<std::size_t>(options_.num_slots)),
      lane_(Lane::read_weights, options_.store->pace(), ledger_) {
  NORIA_INVARIANT(options_.records.size() == units.size(), "each unit has a record, or -1");
  NORIA_INVARIANT(options_.num_slots > 0, "weights pass through slots");
  for (UnitId unit : units.ids()) records_[unit] = options_.records[static_cast<std::size_t>(unit.value)];
}

FileWeights::Brought FileWeights::bring(UnitId unit) {
  for (int number = 0; number < options_.num_slots; ++number) {
    Slot& slot = slots_[static_cast<std::size_t>(number)];
    if (slot.unit != unit) continue;
    if (why_failed(slot.read).empty()) {
      return {memory_of(number), access_to(slot_buffer(number), Access::Mode::read)};
    }
    slot = {};
  }
  const int number = std::exchange(next_, (next_ + 1) % options_.num_slots);
  const int record = records_[unit];
  const Bytes bytes = options_.store->bytes_of(record);
  Op op;
  op.lane = Lane::read_weights;
  op.verb = Verb::read_weights;
  op.unit = unit;
  op.bytes = bytes;
  // Who writes the record waits for the fetch, and so for this.
  op.accesses = {access_to(slot_buffer(number), Access::Mode::write)};
  auto begun = issuer_.begin(op);
  const std::int64_t least_ns = options_.store->pace()->least_ns(Lane::read_weights, bytes);
  // What is read is checked by itself, so a read waits only for memory: a failed fetch does not matter.
  Ticket read =
      lane_.submit({begun.label, std::move(begun.waits), bytes, least_ns,
                    [store = options_.store, record, memory = memory_of(number)] { store->read(record, memory); },
                    /*needs_success=*/false});
  issuer_.keep(op.id, read);
  slots_[static_cast<std::size_t>(number)] = {unit, std::move(read)};
  return {memory_of(number), access_to(slot_buffer(number), Access::Mode::read)};
}

void FileWeights::note_written(UnitId unit) {
  for (Slot& slot : slots_) {
    if (slot.unit != unit) continue;
    try {
      slot.read->wait_passed();
    } catch (...) {  // NOLINT(bugprone-empty-catch): who fetches the unit hears of it
    }
    slot = {};
  }
  options_.store->note_mapped_write(records_[unit]);
}

BufferId FileWeights::slot_buffer(int slot) {
  const Place place{Place::Kind::host, kWeightsSlotsRegion};
  return issuer_.buffers().intern({place, Bytes{slot}, Bytes{1}, Format::travel, Purpose::weights_slot, UnitId()});
}

Access FileWeights::access_to(BufferId buffer, Access::Mode mode) {
  const bool writes = mode == Access::Mode::write;
  return {buffer, writes ? issuer_.next_version(buffer) : issuer_.version(buffer), mode};
}

}  // namespace noria
