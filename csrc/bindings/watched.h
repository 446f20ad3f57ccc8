// Storages that say when somebody is about to write to them: the first write access since they were last watched calls
// back before it happens. Reading operators never do; `numpy()`, `data_ptr()` and `torch.save` ask for write access
// too, so "about to write" means "look". Before torch 2.13 there is no such call, and nothing is watched.
//
// Ownership: a tensor made here borrows its memory and keeps the callback. Threads: the callback runs on the thread
// that writes, with or without the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <functional>
#include <memory>

#include "bindings/torch_compat.h"

namespace noria {

using BeforeWrite = std::shared_ptr<std::function<void()>>;

/// A tensor over `memory` with the geometry given, unwatched as yet; `before_write` null: it never will be.
at::Tensor tensor_over(std::byte* memory, std::int64_t num_bytes, c10::Device device, at::ScalarType dtype,
                       at::IntArrayRef sizes, at::IntArrayRef strides, const BeforeWrite& before_write);

/// From now on the first write access to `storage`, of a tensor made by `tensor_over` with a callback, calls back,
/// once.
void watch(const c10::Storage& storage);
void unwatch(const c10::Storage& storage);

/// The tensor's bytes lie there from now on; it keeps its callback and what else its storage owns.
void move_tensor(const at::Tensor& tensor, std::byte* memory);

}  // namespace noria
