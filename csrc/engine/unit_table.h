// UnitTable owns the engine's units, and a copy of their facts for the planner. It keeps both equal.
//
// Threads: the caller serialises.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "base/unit_map.h"
#include "engine/unit.h"

namespace noria {

class UnitTable {
 public:
  explicit UnitTable(UnitMap<EngineUnit> units) : units_(std::move(units)), facts_(units_.size()) {
    for (UnitId unit : ids()) facts_[unit] = units_[unit].facts;
  }

  const EngineUnit& operator[](UnitId unit) const { return units_[unit]; }
  std::size_t size() const { return units_.size(); }
  UnitIds ids() const { return units_.ids(); }
  const UnitMap<UnitFacts>& facts() const { return facts_; }

  /// The unit's gradients are held here from now on.
  void hold(UnitId unit, std::byte* held, BufferId buffer) {
    units_[unit].held = held;
    units_[unit].facts.held = facts_[unit].held = buffer;
  }
  /// The unit's gradients have no memory for now.
  void release_held(UnitId unit) { units_[unit].held = nullptr; }
  /// Gradients that are not reduced over the ranks lie here from now on.
  void hold_unreduced(UnitId unit, std::byte* unreduced, BufferId buffer) {
    units_[unit].unreduced = unreduced;
    units_[unit].unreduced_buffer = buffer;
  }
  /// Drafts of the unit are logged here from now on.
  void log_drafts(UnitId unit, const UndoLog& log) { units_[unit].undo_log = log; }

 private:
  UnitMap<EngineUnit> units_;
  UnitMap<UnitFacts> facts_;
};

}  // namespace noria
