// Decides what a pipeline stage needs of others and can spare, and what it asks back of those it has lent to.
//
// Pure functions. Units: bytes. plan/matching.h turns needs and spare memory into loans.
//
// Example: a stage has room for 96 MiB of saved tensors and its blocks save at most 32 MiB, so it spares 64 MiB. Later
// they save 48 MiB. So it asks for the 16 MiB that it now lacks, in proportion to its loans.
#pragma once

#include <optional>
#include <vector>

#include "base/bytes.h"

namespace noria {

struct SavedPeak {
  Bytes most;     // the most that the stage's blocks save at once
  Bytes largest;  // the most that one block saves
};

struct NeedAndSpare {
  Bytes needed, spare;  // at most one of them is not 0
  auto operator<=>(const NeedAndSpare&) const = default;
};

/// Returns what a stage needs of others and what it can spare. `room`: what its own device has for saved tensors.
/// Without `room` everything leaves the device. Otherwise the need is the excess over the room, plus three blocks, in
/// whole blocks. Two of the three are for tensors that are saved now, and for tensors that leave or return meanwhile.
/// The third is for ranges that do not fit each other.
NeedAndSpare need_and_spare(SavedPeak saved, std::optional<Bytes> room);

/// Returns what a stage lacks for its own saved tensors while it lends `lent` bytes of its room; 0 or less if it lacks
/// nothing.
Bytes lacking(SavedPeak saved, Bytes room, Bytes lent);

/// Returns what each borrower may keep if the lender lacks `lacked`. `kept`: what each may keep until now, in
/// multiples of kLoanGranule, as the result. `in_parts` false: the lender's arena returns as a whole, so they keep
/// nothing.
std::vector<Bytes> ask_back(std::vector<Bytes> kept, Bytes lacked, bool in_parts);

}  // namespace noria
