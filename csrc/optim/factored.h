// Runs jobs of adafactor: an update of an element needs sums over its row, its column and the whole parameter.
//
// Units: elements.
// Ownership: none; the caller owns the arrays.
// Order: the job goes through its parameters several times, in parts of a size that only depends on the parameters'
//   shapes. Sums of parts are added in order. So the bits are the same on any number of threads.
// Threads: one call at a time for each FactoredUpdate.
//
// Note [Sums]. Squares are added in fp32 over 64 rows or 2048 columns at most. Such sums are added in fp32 over a band
// of rows, and those of bands in fp64. torch adds all squares in fp32, one by one. It also multiplies the two factors
// of every element, and takes a root and a quotient of that. Here a factor's root is taken once for its row or column.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "optim/update.h"

namespace noria {

class FactoredUpdate {
 public:
  FactoredUpdate();
  ~FactoredUpdate();
  FactoredUpdate(const FactoredUpdate&) = delete;  // memory of one caller
  FactoredUpdate& operator=(const FactoredUpdate&) = delete;

  /// Runs the job. `part_done` is called after each part that is written.
  void run(const UpdateJob& job, const ForEach& for_each, const std::function<void()>& part_done,
           const std::string& instruction_set = "");

 private:
  struct Plan;
  struct Part;
  class Run;

  // Kept between jobs, so that none is taken in a steady state.
  std::vector<Plan> plans_;  // by piece
  std::vector<Part> parts_;
  std::vector<float> by_row_, by_column_, band_sums_;
};

}  // namespace noria
