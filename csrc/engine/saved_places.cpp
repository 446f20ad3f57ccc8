#include "engine/saved_places.h"

#include "base/errors.h"
#include "engine/unit.h"

namespace noria {

Extents SavedPlaces::take(Bytes bytes, bool of_home) {
  if (!of_home) {
    Extents extents = peers_.take(bytes);
    if (!extents.empty()) return extents;
  }
  auto range = home_.take(bytes);
  if (!range) {
    const auto [memory, more] = more_home_(bytes);
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

void SavedPlaces::give_back(const Extents& extents) {
  if (is_at_peers(extents)) peers_.give_back(extents);
  else home_.give_back(extents.front().range);
}

}  // namespace noria
