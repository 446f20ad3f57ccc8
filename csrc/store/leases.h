// Leases owns the window: one range of device memory, handed out by offset to weights and gradient buffers.
//
// The planner chooses the offsets. This class turns them into addresses and records what was leased at once, so that
// plan and ledger can be compared to the byte.
// Ownership: owns the arena. It is taken once and given back at the end, or in between by `give_up`.
// Threads: the caller serialises.
#pragma once

#include <map>
#include <memory>

#include "base/bytes.h"
#include "device/backend.h"

namespace noria {

class Leases {
 public:
  Leases(std::shared_ptr<Backend> backend, Bytes arena);
  ~Leases();
  Leases(const Leases&) = delete;  // owns device memory
  Leases& operator=(const Leases&) = delete;

  /// Throws InvariantError if the range overlaps a live lease or leaves the arena. A correct plan never asks for that.
  std::byte* take(Bytes offset, Bytes bytes, bool is_weights);
  void release(Bytes offset);

  /// Gives the arena back to the device. No range is leased, and no op that may still run touches the arena.
  void give_up();
  /// Takes it again at its size, perhaps elsewhere. Throws MachineError if the device has no room; nothing has changed
  /// then. Does nothing if the arena is there.
  void take_again();
  /// The arena has this size when it is taken again. Order: between `give_up` and `take_again`.
  void resize(Bytes arena);

  bool is_taken() const { return arena_ != nullptr; }

  std::byte* at(Bytes offset) const { return arena_ + offset.count; }
  Bytes arena_bytes() const { return arena_ == nullptr ? Bytes{0} : bytes_; }
  Bytes peak() const { return peak_; }            // highest end of any lease so far
  int peak_units() const { return peak_units_; }  // most weight leases at once
  int num_units() const { return num_units_; }
  std::size_t num_leases() const { return live_.size(); }

 private:
  struct Live {
    Bytes bytes;
    bool is_weights;
  };
  std::shared_ptr<Backend> backend_;
  std::byte* arena_ = nullptr;
  Bytes bytes_;
  std::map<Bytes, Live> live_;  // by offset
  Bytes peak_;
  int num_units_ = 0;
  int peak_units_ = 0;
};

}  // namespace noria
