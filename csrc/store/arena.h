// Arena owns a range of host memory of exactly the requested size. The home consists of arenas.
//
// Units: bytes. The machine is asked for whole pages; nothing else is rounded up (`mapped_bytes`).
// Ownership: owns the mapping, and its registration with a backend if there is one; the registration ends first. Move
// only; an arena is empty after a move or `close`. A page is taken by `populate`, or else by the first write to it. A
// forked child does not inherit a range that is registered with a backend that pins it. The child may map something
// else at the same address, so closing an arena there gives nothing back.
// Order: `prefer_node`, then `populate`, then `register_with`; each may be left out.
// Threads: the caller serialises; `all_mapped` may be called from any.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>

#include "base/bytes.h"
#include "device/backend.h"
#include "store/populate.h"

namespace noria {

/// Describes bytes from `begin` on, up to `end`.
struct ByteRange {
  Bytes begin, end;
  Bytes bytes() const { return end - begin; }
};

class Arena {
 public:
  Arena() = default;
  /// Throws MachineError with the sizes if the machine refuses. Nothing is taken then.
  explicit Arena(Bytes bytes);
  /// Takes addresses alone. An access there ends the process until the caller maps memory over them. They count in no
  /// sum of mapped bytes, and a forked child has none of them.
  static Arena of_addresses(Bytes bytes);
  /// Takes no memory for the ranges `elsewhere`: the caller maps files there, before any access. They ascend, and begin
  /// and end at pages.
  Arena(Bytes bytes, std::vector<ByteRange> elsewhere);
  ~Arena();  // does not throw: a failure to unregister is lost, so call `close` if it matters
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;  // one owner per mapping
  Arena& operator=(const Arena&) = delete;

  /// Asks the kernel to take new pages from this NUMA node as long as the node has any. Returns why the machine
  /// refused, or an empty string. Pages of another node serve as well, only slower.
  std::string prefer_node(int node);
  /// Takes all pages: see store/populate.h.
  void populate(const OnPopulated& told = {}, PopulateOptions options = {});
  /// Makes the range reachable by the backend's copy engines. This takes all of its pages, so populate it first, in
  /// parallel. Call at most once. The backend is kept until `close`. Returns what `Backend::register_home` returns: why
  /// the range is staged, or an empty string.
  std::string register_with(std::shared_ptr<Backend> backend, HomeUse use = HomeUse::device);
  /// Takes memory for what lies elsewhere. `fill` writes the bytes of a range, by its number, to pages that then get
  /// the range's addresses. Throws MachineError if the machine has too little, and what `fill` throws; then nothing has
  /// changed. If it throws later, the last ranges lie in memory.
  void take_in(const std::function<void(int, std::byte*)>& fill);
  /// Lets children that this process forks from now on inherit the range. Call it only when no engine moves the bytes
  /// any more: a fork must not move the pages of a registered range before that.
  void allow_fork();
  /// Unregisters and unmaps. The memory is given back even if unregistering throws. Idempotent.
  void close();

  std::byte* data() const { return data_; }  // aligned to 2 MiB, so that huge pages fit; null if empty
  Bytes bytes() const { return bytes_; }
  Bytes mapped_bytes() const;
  /// Returns the bytes that lie in memory: all but what lies elsewhere.
  Bytes memory_bytes() const;
  const std::vector<ByteRange>& elsewhere() const { return elsewhere_; }
  bool registered() const { return backend_ != nullptr; }
  /// Returns the mapped bytes of all arenas of this process.
  static Bytes all_mapped();

 private:
  std::vector<ByteRange> in_memory() const;
  void unregister();

  std::byte* data_ = nullptr;
  pid_t process_ = 0;  // the process that made the mapping
  Bytes bytes_;
  bool has_memory_ = true;
  std::vector<ByteRange> elsewhere_;
  std::vector<std::byte*> registered_;  // where ranges begin that are registered with the backend
  std::shared_ptr<Backend> backend_;
};

}  // namespace noria
