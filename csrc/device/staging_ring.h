// Carries copies between the device and home memory that is not pinned, through a ring of a few pinned pieces.
//
// Ownership: borrows the ring's memory and the link.
// Order: pieces are used in turn. Down (home to device), a piece is filled again once the link has read it. Up (device
//   to home), a piece is emptied into the home before the link writes it again. A transfer up has landed only after
//   `land`.
// Threads: only the lane's thread.
#pragma once

#include <cstddef>
#include <vector>

#include "device/backend.h"

namespace noria {

class StagingRing {
 public:
  /// Moves pieces for the lane. Every member may throw; then the transfer is given up, and the ring stays usable.
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

  /// Copies from home to device. The home has been read when this returns.
  void carry_down(const CopySpan& span, Link& link);
  /// Copies from device to home. The home may not hold the bytes yet when this returns.
  void carry_up(const CopySpan& span, Link& link);
  /// Blocks until the home holds everything that was carried up.
  void land(Link& link);
  /// Drops what was carried up and has not landed.
  void give_up();

 private:
  struct Piece {
    std::byte* memory;
    bool marked = false;
    CopySpan landing{nullptr, nullptr, {}};  // where its bytes go in the home
  };
  std::size_t next_free(Link& link);
  void empty(std::size_t piece, Link& link);

  const Bytes piece_bytes_;
  std::vector<Piece> pieces_;
  std::size_t next_ = 0;
};

}  // namespace noria
