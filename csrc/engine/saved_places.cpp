#include "engine/saved_places.h"

#include "base/errors.h"
#include "engine/unit.h"

namespace noria {

Stretches SavedPlaces::take(Bytes bytes, bool of_home) {
  if (!of_home) {
    Stretches stretches = peers_.take(bytes);
    if (!stretches.empty()) return stretches;
  }
  auto range = home_.take(bytes);
  if (!range) {
    const auto [memory, more] = callbacks_.more_home(bytes);
    home_.add(memory, more);
    range = home_.take(bytes);
  }
  NORIA_INVARIANT(range.has_value(), "there is no room for what a forward saves after more has been taken");
  const BufferId copy = buffers_.intern({{Place::Kind::host, kSavedCopiesRegion},
                                         range->offset,
                                         range->bytes,
                                         Format::compute,
                                         Purpose::saved_copy,
                                         UnitId()});
  return {{{}, bytes, range->memory, copy, 0, std::nullopt, *range}};
}

void SavedPlaces::give_back(const Stretches& stretches) {
  if (is_at_peers(stretches)) peers_.give_back(stretches);
  else home_.give_back(stretches.front().range);
}

}  // namespace noria
