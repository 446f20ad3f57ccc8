// ByteLooks finds out if the bytes of a unit on a device have changed during a visit. The calling thread does not wait
// for the device.
//
// `begin` sums the bytes when the visit begins. `end` sums them again, compares on the device, and copies the answer to
// pinned memory. `changed` returns the units whose answer has come and is yes.
//
// The bytes are taken as 64-bit words in rows of a prime length, and each column is summed. A word that changes alone
// changes a sum. So do two words that change places, unless they are a multiple of the prime apart.
//
// Order: all that runs on the device runs on the current stream, and `end` is called before anything else may write
// there. Threads: `watch`, `begin` and `end` on the thread that launches the unit's kernels, the others on any.
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

  /// From now on `begin` sums this unit.
  void watch(UnitId unit) { is_watched_[unit] = true; }
  void begin(UnitId unit, const at::Tensor& bytes);
  bool has_begun(UnitId unit) const { return sums_[unit].has_value(); }
  void end(UnitId unit, const at::Tensor& bytes);
  /// The visit ends without a look.
  void drop(UnitId unit) { sums_[unit].reset(); }

  /// Returns the units that are known to have changed since the last call.
  std::vector<UnitId> changed();
  /// Blocks until all looks are answered. Then as `changed`.
  std::vector<UnitId> await_changed();

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
  std::vector<UnitId> take_changed() NORIA_REQUIRES(mutex_);

  const c10::Device device_;
  UnitMap<bool> is_watched_;
  UnitMap<std::optional<Sums>> sums_;  // of units that are in a visit
  Mutex mutex_;
  std::deque<Pending> pending_ NORIA_GUARDED_BY(mutex_);      // in the order of the stream
  std::vector<at::Tensor> answers_ NORIA_GUARDED_BY(mutex_);  // pinned memory for the next ones
};

}  // namespace noria
