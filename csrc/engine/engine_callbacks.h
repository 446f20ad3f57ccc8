// EngineCallbacks tells the holder of the parameters where a unit's bytes are now. It also asks for memory, and for
// deferred updates.
//
// Order: from `attach` of a unit until `evict` returns, the range holds the unit's weights. They have the home's
// version, as the compute stream sees it.
// Threads: called inside of a call of the engine, on its thread, without the GIL. Only `update` and `more_home`, which
// run Python code, may call the engine.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/ids.h"
#include "base/ranges.h"
#include "device/stream.h"

namespace noria {

class EngineCallbacks {
 public:
  virtual ~EngineCallbacks() = default;

  virtual void attach(UnitId unit, std::byte* weights) = 0;
  /// Returns false if the range was written meanwhile. Then no copy on the device or at peers is used again.
  virtual bool evict(UnitId unit) = 0;
  /// Returns the units that were written, if this became known after their `evict` and since the last call.
  virtual std::vector<UnitId> take_stale() { return {}; }
  virtual void open_gradients(UnitId unit, std::byte* buffer) = 0;
  /// `is_drained`: what was written there is on its way to the held gradient, and replaces it.
  virtual void close_gradients(UnitId unit, bool is_drained) = 0;
  /// Returns the ranges of held gradients that new gradients are added to. Leaves out gradients that something may
  /// write unnoticed.
  virtual Ranges held_gradients(UnitId unit) const = 0;
  /// The unit's gradients are held here until the next call. For update="backward", and for gradients not reduced yet.
  virtual void held_moved(UnitId unit, std::byte* held) = 0;
  /// Returns at least `least` more bytes of home memory, for what is saved and leaves the device. Throws UsageError if
  /// there is none.
  virtual std::pair<std::byte*, Bytes> more_home(Bytes least) = 0;
  /// Returns device memory for what was saved and has left. The callbacks keep it until `release_saved` is called for
  /// it.
  virtual std::byte* make_room(SavedId saved, Bytes bytes) = 0;
  /// Fills that memory from the home, on the compute stream. Blocks until it is done.
  virtual void fill(SavedId saved, const std::byte* from, Bytes bytes) = 0;
  /// What was saved now lies only at home or at a peer, or will not be asked for. Its memory on the device may go.
  virtual void release_saved(SavedId saved) = 0;
  /// Runs the unit's deferred update now: on the calling thread (kernel="torch"), or of one piece on the current
  /// stream (engine/streamed_updates.h).
  virtual void update(UnitId unit) = 0;
  /// Returns the stream on which the calling thread launches work now.
  virtual Stream current_stream() const = 0;
};

}  // namespace noria
