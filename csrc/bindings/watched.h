// Makes storages that call back before something writes to them.
//
// The first write access after `watch` calls back, before it happens. Reading operators never do. `numpy()`,
// `data_ptr()` and `torch.save` ask for write access too, so a call means only that a write may follow. On CUDA,
// multi-tensor kernels write without asking: bindings/listening.h.
//
// Ownership: a storage made here borrows its memory and keeps the callback.
// Threads: the callback runs on the thread that writes, with or without the GIL.
//
// Note [Before torch 2.13]. There a storage has no such callback, but it can be a lazy copy. At the first write access,
// torch asks the storage's allocator for memory for the copy. The allocator of a watched storage returns the memory
// that is there already, and copies nothing; the request itself is the notice. The environment variable
// NORIA_LAZY_COPIES=1 selects this way for every torch version, for tests.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <functional>
#include <memory>
#include <string>

namespace noria {

using BeforeWrite = std::shared_ptr<std::function<void()>>;

/// Returns true if this process watches storages as lazy copies, see the Note.
bool uses_lazy_copies();

/// Returns a storage over `memory`, not watched yet. If `before_write` is null, it can never be watched.
c10::Storage storage_over(std::byte* memory, std::int64_t num_bytes, c10::Device device,
                          const BeforeWrite& before_write = nullptr);

/// Returns a tensor in `storage`, with a version counter of its own. `more`: keys besides its device's.
/// Units: `offset` in elements.
at::Tensor tensor_in(const c10::Storage& storage, std::int64_t offset, c10::Device device, at::ScalarType dtype,
                     at::IntArrayRef sizes, at::IntArrayRef strides, c10::DispatchKeySet more = {});

/// Returns such a tensor in a new storage over `memory`.
at::Tensor tensor_over(std::byte* memory, std::int64_t num_bytes, c10::Device device, at::ScalarType dtype,
                       at::IntArrayRef sizes, at::IntArrayRef strides, const BeforeWrite& before_write = nullptr);

/// Makes the next write access to `storage` call back, once. `storage_over` must have made it with a callback.
void watch(const c10::Storage& storage);
void unwatch(const c10::Storage& storage);

/// Returns true once Python has asked for the storage object. noria does not notice what Python writes through it.
bool has_python_object(const c10::Storage& storage);

/// Gives the storage memory of its own. It becomes an ordinary storage and drops its callback.
void give_memory(const c10::Storage& storage, c10::DataPtr&& memory);

/// Points the storage at `memory`. It keeps its callback, and stays watched if it was.
void move_storage(const c10::Storage& storage, std::byte* memory);

/// Makes every access to the storage raise, until `allow_access`. Order: it must not be watched.
void refuse_access(const c10::Storage& storage, const std::string& why);
void allow_access(const c10::Storage& storage);

}  // namespace noria
