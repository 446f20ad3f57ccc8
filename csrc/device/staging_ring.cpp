#include "device/staging_ring.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/errors.h"

namespace noria {

namespace {

/// Cuts a span into pieces, and calls `carry` with each.
template <class Carry>
void in_pieces(const CopySpan& span, Bytes piece_bytes, const Carry& carry) {
  for (Bytes done; done < span.bytes; done += piece_bytes) {
    carry(CopySpan{span.to + done.count, span.from + done.count, std::min(piece_bytes, span.bytes - done)});
  }
}

}  // namespace

StagingRing::StagingRing(std::byte* memory, Bytes piece_bytes, int num_pieces) : piece_bytes_(piece_bytes) {
  NORIA_INVARIANT(piece_bytes.count > 0 && num_pieces > 0, "a staging ring without pieces");
  for (int i = 0; i < num_pieces; ++i) pieces_.push_back({memory + i * piece_bytes.count});
}

void StagingRing::carry_down(const CopySpan& span, Link& link) {
  in_pieces(span, piece_bytes_, [&](const CopySpan& part) {
    const std::size_t at = next_free(link);
    std::memcpy(pieces_[at].memory, part.from, static_cast<std::size_t>(part.bytes.count));
    link.copy(part.to, pieces_[at].memory, part.bytes);
    link.mark(at);
    pieces_[at].marked = true;
  });
}

void StagingRing::carry_up(const CopySpan& span, Link& link) {
  in_pieces(span, piece_bytes_, [&](const CopySpan& part) {
    const std::size_t at = next_free(link);
    link.copy(pieces_[at].memory, part.from, part.bytes);
    link.mark(at);
    pieces_[at].marked = true;
    pieces_[at].landing = {part.to, pieces_[at].memory, part.bytes};
  });
}

void StagingRing::land(Link& link) {
  for (std::size_t i = 0; i < pieces_.size(); ++i) empty((next_ + i) % pieces_.size(), link);  // the oldest first
}

void StagingRing::give_up() {
  for (Piece& piece : pieces_) piece.landing = {nullptr, nullptr, {}};
}

std::size_t StagingRing::next_free(Link& link) {
  const std::size_t at = next_;
  empty(at, link);
  next_ = (next_ + 1) % pieces_.size();
  return at;
}

void StagingRing::empty(std::size_t at, Link& link) {
  Piece& piece = pieces_[at];
  if (!std::exchange(piece.marked, false)) return;
  link.await(at);
  const CopySpan landing = std::exchange(piece.landing, {nullptr, nullptr, {}});
  if (landing.to != nullptr) {
    std::memcpy(landing.to, landing.from, static_cast<std::size_t>(landing.bytes.count));
  }
}

}  // namespace noria
