// In which order backwards come: as the last time.
//
// Forwards are numbered as they come. A round begins with a forward before which all that was saved has been used: a
// step of a pipeline, or one forward and its backward. The backward of a round's nth forward is taken to come where
// that of the last round's nth came; where that is not known, in the order of the forwards. Ownership, threads: plain
// data; the caller serialises.
#pragma once

#include <cstdint>
#include <vector>

namespace noria {

class BackwardOrder {
 public:
  void begin_forward(bool is_new_round);
  /// The number of the forward that began last.
  std::int64_t newest() const { return newest_; }
  /// Something of this forward's was asked for: its backward has begun, if it had not yet.
  void note_backward(std::int64_t forward);

  /// The backward of the one comes before that of the other; each in this round.
  bool comes_before(std::int64_t one, std::int64_t other) const;
  /// A forward that has yet to begin has its backward before this one.
  bool awaits_one_before(std::int64_t forward) const;

 private:
  static constexpr std::int64_t kNever = -1;

  /// Where in the round.
  std::int64_t place(std::int64_t forward) const;

  std::int64_t newest_ = 0;
  std::int64_t first_ = 1;              // forward of the round
  std::int64_t num_backwards_ = 0;      // of the round
  std::vector<std::int64_t> places_;    // by forward of the round: where in the order of its backwards
  std::vector<std::int64_t> expected_;  // the last round's
};

}  // namespace noria
