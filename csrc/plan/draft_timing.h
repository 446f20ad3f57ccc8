// Decides when early work on gradients begins: in which backward, and after which of its drains.
//
// LastBackward learns which backward is the last before a step. If a step followed a backward, one is expected after
// the next backward of the same kind. DraftTiming tells when the last gradients of a unit have been drained.
//
// Ownership, threads: plain data; the caller serialises.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/unit_map.h"
#include "plan/itinerary.h"

namespace noria {

class LastBackward {
 public:
  /// A backward begins. So the one before it was not the last.
  void begin_backward() { note(false); }
  void end_backward(ItineraryId backward) { unknown_ = backward; }
  void end_step() { note(true); }
  /// Returns true if a step followed this backward the last time.
  bool is_last(ItineraryId backward) const {
    const auto known = is_last_.find(backward);
    return known != is_last_.end() && known->second;
  }
  void forget(ItineraryId backward) { is_last_.erase(backward); }

 private:
  void note(bool is_last) {
    if (unknown_) is_last_[*std::exchange(unknown_, std::nullopt)] = is_last;
  }

  std::map<ItineraryId, bool> is_last_;
  std::optional<ItineraryId> unknown_;  // the backward that ended last, if nothing has followed it yet
};

class DraftTiming {
 public:
  explicit DraftTiming(std::size_t num_units) : landed_(num_units), last_gradient_(num_units, -1) {}

  /// A backward begins. `expected`: the visits of the backward that is expected, if one is.
  void begin_backward(const std::vector<Visit>* expected);
  /// These bytes of the unit's gradients have been drained at the visit of this position. Returns true if the unit's
  /// last gradients are among them: `awaited` bytes have been drained, and no later visit is expected to bring any.
  /// `awaited` none: a rank's shard lands as a whole, whichever gradients it contains.
  bool note_drained(UnitId unit, Bytes bytes, std::int64_t position, std::optional<Bytes> awaited);

 private:
  UnitMap<Bytes> landed_;                // in this backward
  UnitMap<std::int64_t> last_gradient_;  // the visit expected to bring its last gradient; -1: not known
};

}  // namespace noria
