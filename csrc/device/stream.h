// Stream names the queue that the caller computes on: one of the device's streams, or the calling thread itself.
#pragma once

#include <compare>
#include <cstdint>

namespace noria {

class Stream {
 public:
  /// Names the calling thread, whose work is done when it says so.
  Stream() = default;
  /// Names a cudaStream_t, or a compute stream of a HostBackend. A null handle is the device's default stream, as in
  /// torch.
  static Stream of(const void* handle) {
    return Stream(handle == nullptr ? kDefault : reinterpret_cast<std::uintptr_t>(handle));
  }
  /// Takes what `value` has returned.
  explicit Stream(std::uintptr_t value) : value_(value) {}

  bool is_calling_thread() const { return value_ == 0; }
  /// Returns null only for the calling thread. The default stream has the value of cudaStreamLegacy.
  void* handle() const { return reinterpret_cast<void*>(value_); }  // NOLINT(performance-no-int-to-ptr)
  std::uintptr_t value() const { return value_; }
  auto operator<=>(const Stream&) const = default;

 private:
  static constexpr std::uintptr_t kDefault = 1;
  std::uintptr_t value_ = 0;
};

}  // namespace noria
