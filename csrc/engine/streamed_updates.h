// StreamedUpdates updates units on the device though their state lies at home. A unit is cut into pieces. Each piece's
// weights, state and gradients are copied into a slot of device memory, updated there, and copied home.
//
// Ownership: borrows the engine's parts. The caller owns the memory of the slots and of the home.
// Order: pieces are updated in the order of `expect`, unless another op needs a unit earlier. As long as slots are
// free, the next pieces are fetched ahead. All waits between these ops, and those between them and others, are derived.
// Threads: the caller serialises. On the host backend `run` blocks until the pieces have been updated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/unit_map.h"
#include "engine/compute_lane.h"
#include "engine/options.h"

namespace noria {

class StreamedUpdates {
 public:
  struct Copy {
    Bytes at;  // in the slot
    std::byte* home;
    Bytes bytes;
  };
  struct Piece {
    Bytes begin, end;  // in the unit's held gradients. The pieces of a unit cover them
    std::vector<Copy> comes, goes;
  };
  /// The piece that is updated now.
  struct Now {
    std::size_t piece = 0;
    std::byte* memory = nullptr;  // of its slot
  };

  /// `update` updates the piece `now` on the current stream.
  StreamedUpdates(EngineParts parts, ComputeLane& compute, std::function<void(UnitId)> update)
      : parts_(parts),
        compute_(compute),
        update_(std::move(update)),
        pieces_(parts.units.size()),
        drains_(parts.units.size()) {}

  /// Gives the slots their memory, or takes it away (null). Order: no update is expected, and the lanes are idle.
  void set_slots(std::byte* memory, Bytes bytes_of_one, int num_slots);
  /// From now on the unit is updated on the device (no pieces: elsewhere). Order: its update is not expected.
  void set_pieces(UnitId unit, std::vector<Piece> pieces) { pieces_[unit] = std::move(pieces); }
  bool has(UnitId unit) const { return !pieces_[unit].empty(); }

  /// `run` will come for this unit.
  void expect(UnitId unit);
  /// Fetches the next pieces into free slots.
  void fetch_ahead();
  /// Updates the unit. `reads_scales`: its gradients may have late scales. Throws what `update` throws; later pieces
  /// then keep their values. Calls `broke_off` before it throws if a piece could not be fetched.
  void run(UnitId unit, bool reads_scales, const std::function<void(const std::string& why)>& broke_off);
  const Now& now() const;
  /// Returns true if there are slots.
  bool is_used() const { return slots_ != nullptr; }
  /// Returns the bytes that have come to slots, and those that have gone home.
  Bytes come() const { return come_; }
  Bytes gone() const { return gone_; }

  /// Returns why what was updated could not be copied home; empty if it could.
  std::string torn(UnitId unit) const;
  void clear_torn() { drains_.fill({}); }

 private:
  struct Ahead {
    UnitId unit;
    std::size_t piece;
    int slot;
  };

  Ahead take(UnitId unit, std::size_t piece);
  void put_first(UnitId unit);
  void fetch(Ahead ahead);
  void drain(const Ahead& done);
  enum class Way : std::uint8_t { comes, goes };
  Ticket copy(const Ahead& ahead, Way way);
  void drop(UnitId unit);
  std::vector<Access> home_of(const Ahead& piece, Access::Mode mode) const;
  Access slot_of(const Ahead& piece, Access::Mode mode) const;
  Access access_to(const Buffer& of, Access::Mode mode) const;
  std::byte* memory_of(const Ahead& piece) const;

  const EngineParts parts_;
  ComputeLane& compute_;
  const std::function<void(UnitId)> update_;
  UnitMap<std::vector<Piece>> pieces_;
  std::byte* slots_ = nullptr;
  Bytes slot_bytes_;
  std::deque<int> free_;                                 // the one that was used longest ago comes first
  std::deque<std::pair<UnitId, std::size_t>> expected_;  // not fetched yet
  std::deque<Ahead> ahead_;                              // fetched, not updated yet
  std::optional<Now> now_;
  Bytes come_, gone_;
  UnitMap<std::vector<Ticket>> drains_;  // of the unit's last update
};

}  // namespace noria
