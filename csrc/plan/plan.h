// Describes as data what lies where and when: buffers, ops with accesses, leases, and the plan of one pass.
//
// The planner makes these. `hazards` derives every wait from them, the simulator runs them in virtual time, and the
// engine runs them for real. They hold no pointers and know no device.
//
// Order: ops are listed in issue order, and issue order defines what the program means. A read sees the last write that
// was issued before it. Versions count the writes of a buffer. In a PassPlan they are relative to the version at the
// beginning of the pass (0), so one plan serves every step.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "base/bytes.h"
#include "base/ids.h"
#include "base/unit_map.h"
#include "base/words.h"

namespace noria {

struct Place {
  enum class Kind : std::uint8_t { device, host, peer, file };
  Kind kind = Kind::device;
  std::int32_t index = 0;  // device number, region of the home, rank or file number
  auto operator<=>(const Place&) const = default;
};
/// Returns text such as "device:0", "host", "peer:3" or "file:1".
std::string to_string(const Place& place);

/// Names the three roles of a unit's bytes. Roles are kept apart even if two of them have the same dtype today.
enum class Format : std::uint8_t { master, travel, compute };

enum class Purpose : std::uint8_t {
  weights,
  gradient_buffer,
  working_copy,
  held_gradient,
  optimizer_state,
  gradient_sum,
  gradient_scales,  // held gradients are multiplied by these when they are used
  unreduced_gradient,
  saved_tensor,  // on the device: what a forward saves for its backward
  saved_copy,    // in the home or at a peer: a copy of a saved tensor
  peer_copy,     // at a peer: a copy of a unit
  update_slot,   // on the device: a piece of a unit that is updated there
  record,        // in a file: a unit's state
  state_slot,    // in host memory: the state of a unit that has a record, while it is there
  weights_slot   // in host memory: frozen weights on their way from a file
};
std::string_view to_string(Purpose purpose);

/// A buffer is a range of a place. Two buffers conflict if their ranges overlap, even if their other fields differ.
struct Buffer {
  Place place;
  Bytes offset;
  Bytes bytes;
  Format format = Format::travel;
  Purpose purpose = Purpose::weights;
  UnitId unit;
  auto operator<=>(const Buffer&) const = default;
};

/// Gives equal buffers equal ids, so a steady state uses a finite number of ids.
class BufferTable {
 public:
  BufferId intern(const Buffer& buffer);
  const Buffer& operator[](BufferId id) const { return buffers_[static_cast<std::size_t>(id.value)]; }
  std::size_t size() const { return buffers_.size(); }

 private:
  std::vector<Buffer> buffers_;
  std::map<Buffer, BufferId> ids_;
};

struct Access {
  enum class Mode : std::uint8_t { read, write };
  BufferId buffer;
  Version version = 0;  // read: the version that must be seen; write: the version that is made
  Mode mode = Mode::read;
};

struct Op {
  OpId id;
  Lane lane = Lane::compute;  // meaningless for Verb::evict, which takes no time and waits for nothing
  Verb verb = Verb::forward;
  UnitId unit;
  MicroBatch micro_batch = 0;
  Bytes bytes;
  std::int32_t visit = -1;  // issued when this visit of the pass opens; -1: before the first
  std::vector<Access> accesses;
};

/// A lease is the right to a range from one op to another, by index into the plan's ops. -1: from the beginning, or to
/// the end, of the pass.
struct Lease {
  BufferId buffer;
  Place place;
  Bytes offset;
  Bytes bytes;
  std::int64_t first_op = -1;
  std::int64_t last_op = -1;
};

/// A resident is a unit whose weights lie on the device between two visits. The weights must have the home's version at
/// the beginning of the pass (0 in the plan). The caller must not pass in stale weights.
struct Resident {
  UnitId unit;
  Bytes offset;
  auto operator<=>(const Resident&) const = default;
};

/// A visit is one use of units in a pass. It names the module that announced it, the units that must be leased while it
/// lasts, and the units whose gradients arrive during it. Each of the latter takes a gradient buffer, which is drained
/// when the visit ends.
struct Visit {
  HookId hook;
  Phase phase = Phase::forward;
  std::vector<UnitId> needs;      // sorted, unique
  std::vector<UnitId> gradients;  // sorted, unique
  auto operator<=>(const Visit&) const = default;
};

/// Notes by unit the index of the last of these visits that names it in `units` (its needs, or its gradients). Other
/// units have -1. `visits` null: no unit is named.
void note_last_visits(const std::vector<Visit>* visits, std::vector<UnitId> Visit::* units,
                      UnitMap<std::int64_t>& last);

struct PassPlan {
  std::vector<Visit> visits;
  std::vector<Op> ops;  // issue order; ids are 0, 1, 2...
  std::vector<Lease> leases;
  std::vector<Resident> exit;  // what stays resident after the pass
  std::int64_t num_fetches = 0;
  Bytes fetched;
  Bytes peak;                   // highest end of any lease
  std::int32_t peak_units = 0;  // most units leased at once
};

/// Returns the plan as text, one op a line: for people, for tests, and to compare two plans.
std::string to_text(const PassPlan& plan, const BufferTable& buffers, const std::vector<std::string>& unit_names);

}  // namespace noria
