// A range of host memory of exactly the size that was asked for: the home's ground.
//
// Units: bytes; what the machine is asked for is rounded up to its page and to nothing else (`mapped_bytes`).
// Ownership: owns the mapping, and its registration with a backend if it has one; the registration ends first. Move
// only; an arena that was moved from or closed is empty. Pages are taken when they are first written. A forked child
// does not inherit the range: copy-on-write would move pages under a running transfer.
// Threads: the caller serialises.
#pragma once

#include <cstddef>
#include <memory>

#include "base/bytes.h"
#include "device/backend.h"

namespace noria {

class Arena {
 public:
  Arena() = default;
  /// Throws MachineError with the sizes when the machine refuses; nothing is taken then.
  explicit Arena(Bytes bytes);
  ~Arena();  // does not throw: a failure to unregister is lost, so call `close` where it matters
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;  // one owner per mapping
  Arena& operator=(const Arena&) = delete;

  /// Makes the range reachable by the backend's copy engines, which takes all of its pages: populate it first, in
  /// parallel. At most once. The backend is kept until `close`.
  void register_with(std::shared_ptr<Backend> backend);
  /// Unregisters and unmaps. The memory is given back even when unregistering throws. Idempotent.
  void close();

  std::byte* data() const { return data_; }  // aligned to 2 MiB, so that huge pages fit; null when empty
  Bytes bytes() const { return bytes_; }
  Bytes mapped_bytes() const;
  bool registered() const { return backend_ != nullptr; }

 private:
  std::byte* data_ = nullptr;
  Bytes bytes_;
  std::shared_ptr<Backend> backend_;
};

}  // namespace noria
