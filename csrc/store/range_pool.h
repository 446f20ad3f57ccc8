// Memory that grows by pieces, handed out range by range, first fit: the same sequence of calls gets the same ranges.
// It may become smaller from its end; then it does not grow again.
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
    Bytes offset;  // in all pieces, one behind the other
    Bytes bytes;   // of which it consists: a multiple of the alignment
  };

  void add(std::byte* memory, Bytes bytes);
  /// None: no piece has that much in one range.
  std::optional<Range> take(Bytes bytes);
  void give_back(const Range& range);
  /// Nothing beyond so many bytes is handed out any more. What has been is taken until it is given back.
  void shrink(Bytes size);
  Bytes size() const { return size_; }
  Bytes taken() const { return taken_; }
  Bytes taken_beyond() const { return taken_beyond_; }  // of these, past the size

 private:
  struct Piece {
    std::byte* memory;
    Bytes begin;  // among all
    Ranges free;  // in the piece
  };
  std::vector<Piece> pieces_;
  Bytes added_, size_, taken_, taken_beyond_;
};

}  // namespace noria
