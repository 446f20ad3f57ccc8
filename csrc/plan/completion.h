// Completion tells when a unit's gradients are complete in a backward (update="backward").
//
// Two things tell which visit of a unit is the last: the backward that is expected, and the number of visits that the
// forwards made. If both are known, both must agree. Each alone may say so too early: two losses may take different
// ways back through one forward.
//
// Example: a unit is visited twice in the forward, and the expected backward visits it at positions 3 and 7. It is
// complete after its second visit if that is at position 7 or later.
//
// Ownership, threads: plain data; the caller serialises.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/unit_map.h"
#include "plan/plan.h"

namespace noria {

class Completion {
 public:
  explicit Completion(std::size_t num_units) : last_visit_(num_units, -1), made_(num_units), left_(num_units) {}

  /// A forward has visited the unit.
  void note_forward(UnitId unit) { ++made_[unit]; }
  /// A backward begins. `expected`: the visits of the backward that is expected, if one is.
  void begin_backward(const std::vector<Visit>* expected);
  /// This backward will complete the unit, and takes over the forwards' count of its visits. If an earlier backward has
  /// used that up, the number of visits is not known.
  void expect(UnitId unit);
  /// The backward has visited the unit. `completes`: `expect` was called for it in this backward. If not, the visit is
  /// taken off the forwards' count, which a later backward takes over.
  void note_backward(UnitId unit, bool completes);
  /// Returns true if the visit at this position of the backward was the unit's last.
  bool is_complete(UnitId unit, std::int64_t position) const;
  /// Returns true if the expected backward visits the unit, and before this position for the last time.
  bool is_past(UnitId unit, std::int64_t position) const {
    return last_visit_[unit] >= 0 && last_visit_[unit] < position;
  }

 private:
  UnitMap<std::int64_t> last_visit_;  // in the expected backward; -1: none, or not known
  UnitMap<int> made_;                 // the forwards' count: visits that no backward has taken
  UnitMap<std::optional<int>> left_;  // visits that this backward has yet to make; none: not known
};

}  // namespace noria
