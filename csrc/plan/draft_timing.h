// Decides when early work on gradients begins: in which backward, and after which of its drains.
//
// LastBackward learns which backward is the last before a step: the one that a step followed the last time. It knows
// backwards by their kind and by their place in the step, the third one for example. DraftTiming tells when the last
// gradients of a unit have been drained.
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
  void begin_backward() {
    note(false);
    ++number_;
  }
  void end_backward(ItineraryId backward) { unknown_ = Key{backward, number_}; }
  void end_step() {
    note(true);
    number_ = 0;
  }
  /// Returns true if a step followed this backward the last time that it had this place among those of a step.
  bool is_last(ItineraryId backward) const {
    const auto known = is_last_.find(Key{backward, number_});
    return known != is_last_.end() && known->second;
  }
  void forget(ItineraryId backward) {
    std::erase_if(is_last_, [&](const auto& each) { return each.first.first == backward; });
  }

 private:
  using Key = std::pair<ItineraryId, int>;  // the number counts the backwards since the last step
  void note(bool is_last) {
    if (unknown_) is_last_[*std::exchange(unknown_, std::nullopt)] = is_last;
  }

  int number_ = 0;
  std::map<Key, bool> is_last_;
  std::optional<Key> unknown_;  // the backward that ended last, if nothing has followed it yet
};

class DraftTiming {
 public:
  explicit DraftTiming(std::size_t num_units)
      : landed_(num_units),
        last_gradient_(num_units, -1),
        last_need_(num_units, -1) {}

  /// A backward begins. `expected`: the visits of the backward that is expected, if one is.
  void begin_backward(const std::vector<Visit>* expected);
  /// These bytes of the unit's gradients have been drained at the visit of this position. Returns true if the unit's
  /// last gradients are among them, and no later visit is expected to need the unit: `awaited` bytes have been drained.
  /// `awaited` none: a rank's shard lands as a whole, whichever gradients it contains.
  bool note_drained(UnitId unit, Bytes bytes, std::int64_t position, std::optional<Bytes> awaited);

 private:
  UnitMap<Bytes> landed_;  // in this backward
  // The last visits that the expected backward makes of the unit: that brings a gradient; that needs its weights. -1:
  // not known.
  UnitMap<std::int64_t> last_gradient_, last_need_;
};

}  // namespace noria
