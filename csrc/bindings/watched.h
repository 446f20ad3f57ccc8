// Storages that say when somebody is about to write to them: the first write access since they were last watched calls
// back before it happens. Reading operators never do; `numpy()`, `data_ptr()` and `torch.save` ask for write access
// too, so "about to write" means "look". On CUDA, multi-tensor kernels write without asking: bindings/listening.h.
//
// Ownership: a storage made here borrows its memory and keeps the callback. Threads: the callback runs on the thread
// that writes, with or without the GIL.
//
// Note [Before torch 2.13] a storage has no such call, but it can be a lazy copy: the first write access asks the
// storage's allocator for memory of its own. The allocator of a watched storage gives out the very memory that is
// there, and copies nothing; that it was asked is the call. NORIA_LAZY_COPIES=1 in the environment watches in that way
// whatever the version: for tests.
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

/// How storages are watched in this process, see the Note.
bool uses_lazy_copies();

/// A storage over `memory` that may be watched, unwatched as yet; `before_write` null: it never will be.
c10::Storage storage_over(std::byte* memory, std::int64_t num_bytes, c10::Device device,
                          const BeforeWrite& before_write = nullptr);

/// A tensor in a storage, with a version counter of its own. `offset` in elements; `more` keys beside its device's.
at::Tensor tensor_in(const c10::Storage& storage, std::int64_t offset, c10::Device device, at::ScalarType dtype,
                     at::IntArrayRef sizes, at::IntArrayRef strides, c10::DispatchKeySet more = {});

/// Both at once.
at::Tensor tensor_over(std::byte* memory, std::int64_t num_bytes, c10::Device device, at::ScalarType dtype,
                       at::IntArrayRef sizes, at::IntArrayRef strides, const BeforeWrite& before_write = nullptr);

/// From now on the first write access to `storage`, made by `storage_over` with a callback, calls back, once.
void watch(const c10::Storage& storage);
void unwatch(const c10::Storage& storage);

/// True once Python has asked for the storage itself. Nobody hears what Python writes through it.
bool has_python_object(const c10::Storage& storage);

/// The storage has memory of its own from now on, and is an ordinary one: it lets go of its callback.
void give_memory(const c10::Storage& storage, c10::DataPtr&& memory);

/// The storage's bytes lie there from now on; it keeps its callback, and is watched as before.
void move_storage(const c10::Storage& storage, std::byte* memory);

/// From now on every access to the storage raises, until `allow_access`. It must not be watched.
void refuse_access(const c10::Storage& storage, const std::string& why);
void allow_access(const c10::Storage& storage);

}  // namespace noria
