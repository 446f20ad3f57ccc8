// RangePool hands out ranges of memory that grows by pieces, first fit. The same sequence of calls gets the same
// ranges. The pool may shrink from its end; then it does not grow again.
//
// Units: bytes. Ownership: the memory is the caller's, and outlives the pool. Threads: the caller serialises.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "base/ranges.h"

namespace noria {

class RangePool {
 public:
  struct Range {
    std::byte* memory = nullptr;
    Bytes offset;  // counted over all pieces, one behind the other
    Bytes bytes;   // a multiple of kTensorAlignment
  };

  void add(std::byte* memory, Bytes bytes);
  /// Returns a range that holds `bytes`, or none if no piece has as many free bytes in one range.
  std::optional<Range> take(Bytes bytes);
  void give_back(const Range& range);
  /// Hands out nothing beyond `size` from now on. A range beyond it stays taken until it is given back.
  void shrink(Bytes size);
  Bytes size() const { return size_; }
  Bytes taken() const { return taken_; }
  Bytes taken_beyond() const { return taken_beyond_; }  // the part of `taken` that lies beyond the size

 private:
  struct Piece {
    std::byte* memory;
    Bytes begin;  // its offset, over all pieces
    Ranges free;  // by offset in the piece
  };
  std::vector<Piece> pieces_;
  Bytes added_, size_, taken_, taken_beyond_;
};

}  // namespace noria
