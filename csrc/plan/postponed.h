// Tells which updates wait for the end of a backward, if state lies in files: see engine/backward_updates.h, Note
// [Postponed]. The engine and the simulator both ask here.
//
// Ownership, order, threads: a pure function.
#pragma once

namespace noria {

/// `number`: how many other units with files have had complete gradients in this backward before. The first updates
/// free slots, so that the disk has work at once. Of the others each third one waits, and two of three keep the disk at
/// work.
constexpr bool is_postponed(int number, int num_slots, int most_postponed) {
  constexpr int kEvery = 3;
  const int behind = number - num_slots;
  return behind >= 0 && behind < kEvery * most_postponed && behind % kEvery == kEvery - 1;
}

}  // namespace noria
