// Decides which bundles of saved activations leave the device and which return. The engine's ActivationStore carries it
// out.
//
// A bundle is what one forward visit saves. These are pure functions of what is known of the bundles.
//
// Example: the device has room for 10 GiB, 9 GiB of it are taken, and a visit is expected to save 2 GiB. Then
// `bytes_to_leave` is 1 GiB, and `farthest` names the bundle that they leave from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "base/ids.h"
#include "plan/backward_order.h"

namespace noria {

struct SavedBundle {
  HookId hook;               // the module that saved it
  std::int64_t forward = 0;  // as BackwardOrder numbers forwards
  bool is_used = false;      // its backward visit has begun
};
/// Returns true if something of the bundle with this index may still be asked for.
using IsAlive = std::function<bool(std::size_t)>;

/// How many bundles stay on the device however little room there is: the one that a backward needs first.
inline constexpr std::size_t kLeastStaying = 1;
/// How many bundles may come back before their backward has begun.
inline constexpr std::size_t kMostAhead = 2;

/// Describes device memory for bundles. `largest`: the largest bundle so far.
struct SavedRoom {
  std::optional<Bytes> room;  // none: as few bundles stay as overlap allows
  Bytes largest;

  /// Returns the smallest room that will do: the bundle of the visit at hand, and one that comes or leaves.
  Bytes least() const { return largest * 2; }
  /// Returns how many bytes may lie on the device at once. Without a room these are four bundles: one stays, one is
  /// saved, two leave.
  Bytes most() const;
  /// Returns how many bytes may stay when a visit has ended. One more bundle is saved while one leaves. If all that was
  /// ever saved at once (`most_saved`) fits, none needs to leave.
  Bytes may_stay(Bytes most_saved) const;
  /// Returns true if `coming` bytes may return before their backward has begun. `there`: bytes on the device. A forward
  /// that begins now must find room for its bundle, and for another one beside it.
  bool has_room_ahead(Bytes there, Bytes coming) const;
};

/// Returns how many of `there` bytes must leave, beside the `leaving` ones, so that `room` holds them and `more`.
Bytes bytes_to_leave(Bytes there, Bytes leaving, Bytes more, Bytes room);

/// Returns the index of the bundle whose backward visit is farthest (Belady's rule). `forwards`: the forward of each
/// bundle that stays, in the order of visits. If several are of that forward, it is the first of them.
std::size_t farthest(const std::vector<std::int64_t>& forwards, const BackwardOrder& order);

/// Returns the indices of storages of these sizes that have at least `least` bytes in all, and few more. Takes the
/// largest while no single one is enough, then the smallest that is enough. Returns all if they have less.
std::vector<std::size_t> enough(const std::vector<Bytes>& sizes, Bytes least);

/// Returns the index of the bundle that a backward visit of this module uses. It is the last one of the module's
/// earliest forward that has one alive and unused. `bundles` are in the order of their visits.
std::optional<std::size_t> next_used(const std::vector<SavedBundle>& bundles, HookId hook, const IsAlive& is_alive);

/// Returns the index of the bundle that is needed next after `used`. It is the one before it in its forward, else the
/// last one of the forward whose backward is next. None: no bundle is left, or a forward that has yet to begin comes
/// first.
std::optional<std::size_t> needed_after(const std::vector<SavedBundle>& bundles, std::size_t used,
                                        const BackwardOrder& order, const IsAlive& is_alive);

}  // namespace noria
