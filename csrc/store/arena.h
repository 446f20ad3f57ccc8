// A range of host memory of exactly the size that was asked for: the home's ground.
//
// Units: bytes; what the machine is asked for is rounded up to its page and to nothing else (`mapped_bytes`).
// Ownership: owns the mapping, and its registration with a backend if it has one; the registration ends first. Move
// only; an arena that was moved from or closed is empty. Pages are taken by `populate`, or when they are first written.
// A forked child does not inherit a range that is registered with a backend that pins it. What it maps itself may then
//   lie at the same address, so closing an arena there gives nothing back.
// Order: `prefer_node`, then `populate`, then `register_with`; each may be left out.
// Threads: the caller serialises.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include <sys/types.h>

#include "base/bytes.h"
#include "device/backend.h"
#include "store/populate.h"

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

  /// Asks that pages which are not taken yet come from this NUMA node as long as it has any. Says why the machine would
  /// not, or nothing: pages of another node serve as well, only slower.
  std::string prefer_node(int node);
  /// Takes all pages: store/populate.h.
  void populate(const OnPopulated& told = {}, PopulateOptions options = {});
  /// Makes the range reachable by the backend's copy engines, which takes all of its pages: populate it first, in
  /// parallel. At most once. The backend is kept until `close`. Returns what `Backend::register_home` does: why the
  /// range is staged, or nothing.
  std::string register_with(std::shared_ptr<Backend> backend, HomeUse use = HomeUse::device);
  /// No engine moves its bytes any more: children that this process forks from now on have them, too. Until then a
  /// registered range has pages that a fork must not move.
  void allow_fork();
  /// Unregisters and unmaps. The memory is given back even when unregistering throws. Idempotent.
  void close();

  std::byte* data() const { return data_; }  // aligned to 2 MiB, so that huge pages fit; null when empty
  Bytes bytes() const { return bytes_; }
  Bytes mapped_bytes() const;
  bool registered() const { return backend_ != nullptr; }
  /// Of all arenas that there are.
  static Bytes all_mapped();

 private:
  std::byte* data_ = nullptr;
  pid_t process_ = 0;  // whose mapping it is
  Bytes bytes_;
  std::shared_ptr<Backend> backend_;
};

}  // namespace noria
