// Whoever holds the parameters: told where a unit's bytes are now.
//
// Threads: called on the thread that announces visits (or settles updates), without the GIL. Order: between `attach`
// and `evict` of a unit the range holds the unit's weights at the home's version, as far as the compute stream is
// concerned.
#pragma once

#include <cstddef>
#include <utility>

#include "base/bytes.h"
#include "base/ids.h"
#include "base/ranges.h"

namespace noria {

class Custodian {
 public:
  virtual ~Custodian() = default;

  virtual void attach(UnitId unit, std::byte* weights) = 0;
  virtual void evict(UnitId unit) = 0;
  virtual void open_gradients(UnitId unit, std::byte* buffer) = 0;
  /// `is_drained`: what was written there is on its way to the held gradient, in place of what that was.
  virtual void close_gradients(UnitId unit, bool is_drained) = 0;
  /// Of the unit's gradients, what is held and will be added to, and nobody writes without a word.
  virtual Ranges held_gradients(UnitId unit) const = 0;
  /// A draft was committed: the unit's working copy lies here now, where the spare one was.
  virtual void home_moved(UnitId unit, std::byte* working) = 0;
  /// The unit's gradients are held here from now on, until it is said again (update="backward").
  virtual void held_moved(UnitId unit, std::byte* held) = 0;
  /// At least so much more memory in the home for what is saved and leaves; throws UsageError where there is none.
  virtual std::pair<std::byte*, Bytes> more_home(Bytes least) = 0;
  /// Memory on the device for what was saved and has left; the custodian keeps it until it is told `left`.
  virtual std::byte* make_room(SavedId saved, Bytes bytes) = 0;
  /// Fills that memory from the home, on the compute stream, and blocks until it is done.
  virtual void fill(SavedId saved, const std::byte* from, Bytes bytes) = 0;
  /// What was saved lies in the home alone, or nobody asks for it: its memory on the device may go.
  virtual void left(SavedId saved) = 0;
  /// Runs the unit's deferred update here and now, on the calling thread (kernel="torch").
  virtual void update(UnitId unit) = 0;
};

}  // namespace noria
