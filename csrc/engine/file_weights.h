// FileWeights brings the frozen weights of units that lie in files to slots in host memory, from where a fetch copies
// them.
//
// Example: unit 7 is fetched. `bring` issues a read_weights op, which gives slot 1 to unit 7. The fetch waits for it
// and reads slot 1. The next unit gets slot 0; its read waits for the fetch that read slot 0 last.
//
// Ownership: owns its lane, and shares the files. Borrows the issuer and the slots.
// Order: a slot's unit changes in issue order. The unit that was brought longest ago loses its slot.
// Threads: the caller serialises. `note_written`, `check`, `close` and `idle` may block.
//
// Note [A lane of its own]. Updates of all units are issued at `step`, and their reads of state with them. Weights that
// the next forward needs must not queue behind these. So they have another lane, and other slots.
#pragma once

#include <memory>
#include <vector>

#include "base/unit_map.h"
#include "device/lane_ledger.h"
#include "device/timed_lane.h"
#include "engine/issuer.h"
#include "engine/unit_table.h"
#include "store/file_store.h"

namespace noria {

struct FileWeightsOptions {
  std::shared_ptr<FileStore> store;  // null: all weights lie in host memory
  std::vector<int> records;          // by unit; -1: its weights lie in host memory
  std::byte* slots = nullptr;        // host memory that the copy engines reach
  Bytes slot_bytes;                  // of one
  int num_slots = 0;
};

class FileWeights {
 public:
  FileWeights(FileWeightsOptions options, Issuer& issuer, const UnitTable& units);
  ~FileWeights() { close(); }
  FileWeights(const FileWeights&) = delete;  // owns a thread that points to it
  FileWeights& operator=(const FileWeights&) = delete;

  bool has(UnitId unit) const { return records_[unit] >= 0; }

  struct Brought {
    const std::byte* memory;  // the bytes of `EngineUnit::in_file`
    Access access;            // of the op that reads them
  };
  /// Gives the unit's weights a slot, unless they have one, and issues the read.
  Brought bring(UnitId unit);
  /// The caller writes the mapped weights: the next fetch reads the file again. Blocks until a read of them is over.
  void note_written(UnitId unit);
  /// The caller reads the mapped weights, which no op compares with checksums: see FileStore::check. Blocks.
  void check(UnitId unit, bool awaits_writes) { options_.store->check(records_[unit], awaits_writes); }
  bool is_any_lost() const { return options_.store->is_any_torn(); }
  FileStore::Loss loss(UnitId unit) const { return options_.store->loss(records_[unit]); }
  /// All weights of the unit that the file has were loaded again.
  void clear_torn(UnitId unit) { options_.store->clear_torn(records_[unit]); }

  LaneStats stats() const { return ledger_.stats(Lane::read_weights); }
  void set_trace(std::shared_ptr<Trace> trace) { ledger_.set_trace(std::move(trace)); }
  void idle() { lane_.idle(); }
  void close() { lane_.close(); }

 private:
  struct Slot {
    UnitId unit;  // not valid: none
    Ticket read;  // which brought it
  };
  std::byte* memory_of(int slot) const { return options_.slots + (options_.slot_bytes * slot).count; }
  BufferId slot_buffer(int slot);
  Access access_to(BufferId buffer, Access::Mode mode);

  const FileWeightsOptions options_;
  Issuer& issuer_;
  UnitMap<int> records_;
  std::vector<Slot> slots_;
  int next_ = 0;  // the slot that was given longest ago
  LaneLedger ledger_;
  TimedLane lane_;  // last: destroyed before what it uses
};

}  // namespace noria
