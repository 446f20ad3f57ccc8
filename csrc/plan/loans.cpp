#include "plan/loans.h"

#include <algorithm>

#include "base/errors.h"
#include "plan/matching.h"

namespace noria {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Two blocks always have room.
Bytes own_need(SavedPeak saved) { return std::max(saved.most, saved.largest * 2); }

}  // namespace

NeedAndSpare need_and_spare(SavedPeak saved, std::optional<Bytes> room) {
  if (!room) return {saved.most, {}};
  if (saved.most <= *room) return {{}, std::max(*room - own_need(saved), Bytes{})};
  NORIA_INVARIANT(saved.largest > Bytes{}, "the blocks save something, and the largest saves nothing");
  const Bytes needed = saved.most - *room + saved.largest * 3;
  return {saved.largest * ceil_div(needed.count, saved.largest.count), {}};
}

Bytes lacking(SavedPeak saved, Bytes room, Bytes lent) { return std::min(own_need(saved), room) - (room - lent); }

std::vector<Bytes> ask_back(std::vector<Bytes> kept, Bytes lacked, bool in_parts) {
  if (lacked <= Bytes{}) return kept;
  std::int64_t all = 0;  // granules
  for (Bytes each : kept) all += each.count / kLoanGranule.count;
  for (Bytes& each : kept) {
    const std::int64_t granules = each.count / kLoanGranule.count;
    if (granules == 0) continue;
    const std::int64_t asked = in_parts ? ceil_div(lacked.count * granules, all * kLoanGranule.count) : granules;
    each = kLoanGranule * std::max(granules - asked, std::int64_t{0});
  }
  return kept;
}

}  // namespace noria
