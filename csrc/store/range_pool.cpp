#include "store/range_pool.h"

#include <algorithm>

#include "base/errors.h"

namespace noria {

void RangePool::add(std::byte* memory, Bytes bytes) {
  Piece piece{memory, size_, {}};
  piece.free.add({}, bytes);
  pieces_.push_back(std::move(piece));
  size_ += bytes;
}

std::optional<RangePool::Range> RangePool::take(Bytes bytes) {
  const Bytes needed = align_up(std::max(bytes, Bytes{1}), kTensorAlignment);
  for (Piece& piece : pieces_) {
    for (const auto& [begin, end] : piece.free) {
      if (end - begin < needed) continue;
      const Bytes at = begin;
      piece.free.remove(at, at + needed);
      taken_ += needed;
      return Range{piece.memory + at.count, piece.begin + at, needed};
    }
  }
  return std::nullopt;
}

void RangePool::give_back(const Range& range) {
  const auto after =
      std::find_if(pieces_.begin(), pieces_.end(), [&](const Piece& piece) { return piece.begin > range.offset; });
  NORIA_INVARIANT(after != pieces_.begin(), "a range of no piece is given back");
  Piece& piece = *(after - 1);
  const Bytes at = range.offset - piece.begin;
  piece.free.add(at, at + range.bytes);
  taken_ = taken_ - range.bytes;
}

}  // namespace noria
