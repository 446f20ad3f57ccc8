// PassState tells which pass is open and what earlier passes were. PassRunner writes it, and `Engine::end_step` notes
// updates in the book. Other owners read it.
#pragma once

#include <cstdint>
#include <optional>

#include "plan/itinerary.h"

namespace noria {

struct PassState {
  std::optional<Phase> phase;  // none: no pass is open
  ItineraryBook book;
  ItineraryId last_forward;

  bool is(Phase asked) const { return phase == asked; }
};

}  // namespace noria
