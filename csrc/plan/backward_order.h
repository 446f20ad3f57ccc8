// BackwardOrder predicts the order in which backwards come: the same as the last time.
//
// Forwards are numbered as they come. A round begins with a forward that comes when all that was saved has been used.
// It is a step of a pipeline, for example, or one forward and its backward. The backward of a round's nth forward is
// expected in the place that the nth forward's backward had in the last round. If that is not known, backwards are
// expected in the order of the forwards.
//
// Ownership, threads: plain data; the caller serialises.
#pragma once

#include <cstdint>
#include <vector>

namespace noria {

class BackwardOrder {
 public:
  void begin_forward(bool is_new_round);
  /// Returns the number of the forward that began last.
  std::int64_t newest() const { return newest_; }
  /// Something that this forward saved was asked for: its backward has begun, if it had not yet.
  void note_backward(std::int64_t forward);

  /// Returns true if the backward of `one` comes before that of `other`, each by its place in this round.
  bool comes_before(std::int64_t one, std::int64_t other) const;
  /// Returns true if a forward that has yet to begin has its backward before this one.
  bool awaits_one_before(std::int64_t forward) const;

 private:
  static constexpr std::int64_t kNever = -1;

  /// Returns the place of this forward's backward in the round.
  std::int64_t place(std::int64_t forward) const;

  std::int64_t newest_ = 0;
  std::int64_t first_ = 1;              // the first forward of the round
  std::int64_t num_backwards_ = 0;      // of the round
  std::vector<std::int64_t> places_;    // by forward of the round: where in the order of its backwards
  std::vector<std::int64_t> expected_;  // the same, of the last round that had a backward
};

}  // namespace noria
