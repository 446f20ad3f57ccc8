#include "store/range_pool.h"

#include <algorithm>

#include "base/errors.h"

namespace noria {

void RangePool::add(std::byte* memory, Bytes bytes) {
  NORIA_INVARIANT(size_ == added_, "a pool that has shrunk grows");
  Piece piece{memory, size_, {}};
  piece.free.add({}, bytes);
  pieces_.push_back(std::move(piece));
  size_ += bytes;
  added_ = size_;
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
  const Bytes kept = std::clamp(size_ - range.offset, Bytes{0}, range.bytes);
  piece.free.add(at, at + kept);
  taken_ -= range.bytes;
  taken_beyond_ -= range.bytes - kept;
}

void RangePool::shrink(Bytes size) {
  NORIA_INVARIANT(size >= Bytes{0} && size <= size_, "a pool does not grow by shrinking");
  taken_beyond_ += size_ - size;
  for (Piece& piece : pieces_) {
    const Bytes begin = size - piece.begin, end = size_ - piece.begin;
    for (const auto& [from, to] : piece.free.within(begin, end)) taken_beyond_ -= to - from;
    piece.free.remove(begin, end);
  }
  size_ = size;
}

}  // namespace noria
