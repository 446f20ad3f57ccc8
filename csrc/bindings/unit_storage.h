// UnitStorage is one non-resizable storage whose bytes move. The parameters of a unit, or its gradient buffer, are
// ordinary tensors in it. To move all of them, noria changes one pointer.
//
// While the storage is attached, it notices write accesses (bindings/watched.h tells what counts as one). Some
// operators write on CUDA without asking for access; `note_write` reports them.
// While the storage is evicted, every access raises: a null pointer alone would crash the process.
//
// Ownership: never owns the memory it points at.
// Threads: moved only by the thread that launches the unit's kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>

#include <memory>
#include <string>

#include "base/bytes.h"

namespace noria {

class UnitStorage {
 public:
  UnitStorage(std::int64_t num_bytes, c10::Device device, std::string evicted_message);

  void attach(std::byte* memory);
  void evict();
  /// From now on an access raises with `message` while the storage is evicted.
  void refuse_with(std::string message);
  bool attached() const { return attached_; }
  /// Returns true if something has asked for write access since `attach`, or has written without asking.
  bool written() const;
  /// Notes that an operator writes it.
  void note_write() { is_told_ = attached_; }
  bool is_told() const { return is_told_; }
  /// Returns the attached memory, or a part of it, as a tensor that noria does not watch.
  at::Tensor bytes(Bytes begin, Bytes bytes) const;
  at::Tensor bytes() const { return bytes({}, Bytes{static_cast<std::int64_t>(storage_.nbytes())}); }

  /// Returns a tensor in this storage, with a version counter of its own. `more`: keys besides its device's.
  /// Units: `offset` in bytes.
  at::Tensor view(at::ScalarType dtype, std::int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides,
                  c10::DispatchKeySet more = {}) const;
  const c10::Storage& storage() const { return storage_; }
  bool is(const c10::Storage& storage) const {
    return storage.unsafeGetStorageImpl() == storage_.unsafeGetStorageImpl();
  }
  bool holds(const at::Tensor& tensor) const { return is(tensor.storage()); }
  /// Returns true if the address `memory` lies in the attached memory.
  bool covers(const void* memory) const;

 private:
  const std::shared_ptr<bool> is_written_;  // since it was attached; the storage's callback sets it
  const c10::Storage storage_;
  const c10::Device device_;
  std::string evicted_message_;
  bool attached_ = true;  // until the constructor evicts it
  bool is_told_ = false;
};

}  // namespace noria
