// FileStates brings the state of units that lies in files to slots in host memory when an op needs it, and puts it
// back.
//
// Example: an update of unit 7 is issued. `bring` issues a read_state op, which gives slot 2 to unit 7. The update
// waits for it and writes slot 2. `put_back` issues a write_state op, which waits for the update. Slot 2 keeps the
// bytes until another unit needs it; that unit's read_state waits for the write.
//
// Ownership: owns the read lane and the write lane, and shares the home in files. Borrows the issuer.
// Order: a slot's unit changes in issue order. A new unit takes the slot of the unit that was used longest ago. If all
//   units have been brought ahead, it takes the slot of the one that was brought last.
// Threads: the caller serialises. `release` and `bring_blank` may block.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/unit_map.h"
#include "device/lane_ledger.h"
#include "device/timed_lane.h"
#include "engine/issuer.h"
#include "engine/unit_table.h"
#include "plan/postponed.h"
#include "store/file_home.h"

namespace noria {

struct FileStatesOptions {
  std::shared_ptr<FileHome> home;  // null: no state lies in files
  std::vector<int> records;        // by unit; -1: its state lies in host memory
  int most_postponed = 0;          // updates; see engine/backward_updates.h, Note [Postponed]
};

class FileStates {
 public:
  FileStates(const FileStatesOptions& options, Issuer& issuer, const UnitTable& units);
  ~FileStates() { close(); }
  FileStates(const FileStates&) = delete;  // owns threads that point to it
  FileStates& operator=(const FileStates&) = delete;

  bool has(UnitId unit) const { return records_[unit] >= 0; }

  /// See plan/postponed.h.
  bool postpones(int number) const { return is_postponed(number, num_planned_, most_postponed_); }

  /// Gives the unit's state a slot, unless it has one, and issues what that needs. Throws MachineError if a slot is
  /// missing because all are held, and the machine has no memory for one more.
  void bring(UnitId unit);
  /// Returns the access of an op that reads and writes the unit's state. Order: behind `bring`.
  Access access(UnitId unit);
  /// Issues the write of the state to its file. Order: behind the op that has changed it.
  void put_back(UnitId unit);
  // ---- update="backward" ----
  /// An update of the unit has been issued, and its state put back. Brings ahead what is expected next. Units that many
  /// others have overtaken are not expected any more, until they are used again.
  void note_used(UnitId unit);
  /// Brings the units ahead whose last update is longest ago: the next ones of this backward, then the first ones of
  /// the next. `left`: slots that stay free for others.
  void bring_ahead(int left = 0);

  /// The unit keeps its slot until `release`. Order: behind `bring`.
  void hold(UnitId unit);
  /// The caller changes the state: it is put back before another unit gets its slot. Order: behind `bring`.
  void note_changed(UnitId unit);
  /// No unit is held any more. Gives back the slots that were taken beyond those of the plan.
  void release();
  /// After a failure: gives the unit a slot with zeros, which the caller overwrites.
  void bring_blank(UnitId unit);

  /// Returns why a unit's state could not be written; empty if it could.
  std::string torn(UnitId unit) const;
  void clear_torn();

  LaneStats stats(Lane lane) const { return ledger_.stats(lane); }
  void set_trace(std::shared_ptr<Trace> trace) { ledger_.set_trace(std::move(trace)); }
  void idle();
  void close();

 private:
  struct Slot {
    UnitId unit;  // not valid: none
    Ticket read;  // which brought it
    bool is_changed = false;
    bool is_held = false;
    std::int64_t used = 0;  // when; a larger number is later
  };
  std::optional<int> slot_of(UnitId unit) const;
  int free_slot();
  BufferId record_buffer(UnitId unit);
  BufferId slot_buffer(int slot);
  Access access_to(BufferId buffer, Access::Mode mode);
  Ticket submit(TimedLane& lane, Op op, Bytes bytes, std::function<void()> work);
  void put_back(int slot);
  void forget(int slot);

  const std::shared_ptr<FileHome> home_;
  Issuer& issuer_;
  UnitMap<int> records_;
  UnitMap<int> slots_of_;  // -1: none
  std::vector<Slot> slots_;
  const int num_planned_;
  const int most_postponed_;
  std::int64_t now_ = 0;
  UnitMap<std::vector<Ticket>> writes_;   // those that have not passed, or have failed
  std::deque<UnitId> expected_;           // not brought ahead; the unit that is expected next comes first
  std::map<UnitId, std::int64_t> ahead_;  // brought ahead, not used yet; and `num_used_` at that time
  std::int64_t num_used_ = 0;
  LaneLedger ledger_;
  TimedLane read_, write_;  // last: destroyed before what they use
};

}  // namespace noria
