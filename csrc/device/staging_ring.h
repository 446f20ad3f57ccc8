// A ring of a few pinned pieces through which a copy lane carries what it cannot reach: home memory that is not pinned.
//
// Ownership: borrows the ring's memory and the link. Order: pieces go round in turn. On the way down (home to device) a
//   piece is filled once the link has read it; on the way up it is emptied into the home before the link writes it
//   again. A transfer up has landed only after `land`.
// Threads: the lane's thread alone.
#pragma once

#include <cstddef>
#include <vector>

#include "device/backend.h"

namespace noria {

class StagingRing {
 public:
  /// What the lane does with pieces. All may throw; the transfer is given up then, and the ring stays usable.
  class Link {
   public:
    virtual ~Link() = default;
    /// Queues a copy between a piece and the device.
    virtual void copy(std::byte* to, const std::byte* from, Bytes bytes) = 0;
    /// Marks the point at which all copies queued so far are done.
    virtual void mark(std::size_t piece) = 0;
    /// Blocks until the piece's last mark is reached.
    virtual void await(std::size_t piece) = 0;
  };

  StagingRing(std::byte* memory, Bytes piece_bytes, int num_pieces);

  /// Home to device. What the home holds is read before this returns.
  void carry_down(const CopySpan& span, Link& link);
  /// Device to home. The home may not hold it yet when this returns.
  void carry_up(const CopySpan& span, Link& link);
  /// Blocks until the home holds all that was carried up.
  void land(Link& link);
  /// What was carried up and has not landed never will.
  void give_up();

 private:
  struct Piece {
    std::byte* memory;
    bool marked = false;
    CopySpan landing{nullptr, nullptr, {}};  // where what it holds belongs
  };
  std::size_t next_free(Link& link);
  void empty(std::size_t piece, Link& link);

  const Bytes piece_bytes_;
  std::vector<Piece> pieces_;
  std::size_t next_ = 0;
};

}  // namespace noria
