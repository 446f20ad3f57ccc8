// ByteLooks finds out if the bytes of a unit on a device have changed during a visit. The calling thread does not wait
// for the device.
//
// `begin` sums the bytes when the visit begins. `end` sums them again, compares on the device, and copies the answer to
// pinned memory. `changed` returns the units whose answer has come and is yes.
//
// The bytes are taken as 64-bit words in rows of a prime length, and each column is summed. A word that changes alone
// changes a sum. So do two words that change places, unless they are a multiple of the prime apart.
//
// Order: all that runs on the device runs on the current stream. Call `end` before anything else may write there.
// Threads: `changed` on any, the others on the thread that launches the unit's kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstddef>
#include <deque>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "base/mutex.h"
#include "base/unit_map.h"

namespace noria {

class ByteLooks {
 public:
  ByteLooks(c10::Device device, std::size_t num_units)
      : device_(device),
        is_watched_(num_units, false),
        sums_(num_units, std::nullopt) {}

  /// From now on the unit's visits begin with a sum.
  void watch(UnitId unit) { is_watched_[unit] = true; }
  bool is_watched(UnitId unit) const { return is_watched_[unit]; }
  void begin(UnitId unit, const at::Tensor& bytes);
  bool has_begun(UnitId unit) const { return sums_[unit].has_value(); }
  void end(UnitId unit, const at::Tensor& bytes);
  /// The visit ends without a look.
  void drop(UnitId unit) { sums_[unit].reset(); }

  /// Returns the units that are known to have changed since the last call. `waits`: blocks until all looks are
  /// answered.
  std::vector<UnitId> changed(bool waits);

 private:
  struct Sums {
    at::Tensor columns;
    at::Tensor rest;  // a copy of what is behind the last whole row
  };
  struct Pending {
    UnitId unit;
    at::Tensor answer;  // a bool in pinned memory
    c10::Event event;   // has passed: the answer is there
  };
  static Sums sums_of(const at::Tensor& bytes);

  const c10::Device device_;
  UnitMap<bool> is_watched_;
  UnitMap<std::optional<Sums>> sums_;  // of units that are in a visit
  Mutex mutex_;
  std::deque<Pending> pending_ NORIA_GUARDED_BY(mutex_);      // in the order of the stream
  std::vector<at::Tensor> answers_ NORIA_GUARDED_BY(mutex_);  // pinned memory for the next ones
};

}  // namespace noria
