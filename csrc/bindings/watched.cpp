#include "bindings/watched.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Allocator.h>
#if !NORIA_TORCH_AT_LEAST(2, 13)
#include <c10/core/impl/COWDeleter.h>
#endif

#include <mutex>
#include <utility>
#include <vector>

namespace noria {
namespace {

#if NORIA_TORCH_AT_LEAST(2, 13)

void delete_callback(void* context) { delete static_cast<BeforeWrite*>(context); }

void on_first_write(c10::StorageImpl* storage) {
  const BeforeWrite callback = *static_cast<BeforeWrite*>(storage->data_ptr().get_context());
  (*callback)();
}

#else

using c10::impl::cow::COWDeleterContext;

// See the Note. A watched storage's data pointer is a lazy copy's, whose context counts two owners: the storage, and
// one that nobody is, so that the storage believes that it must copy. An unwatched one's has the same context, with
// one owner, behind a deleter that torch does not know.
class Watch final : public c10::Allocator {
 public:
  Watch(std::byte* memory, c10::Device device, BeforeWrite before_write)
      : memory(memory),
        device(device),
        before_write_(std::move(before_write)) {}

  /// Torch asks for memory to copy to, because somebody is about to write. It has counted the storage out as an owner,
  /// so what it is given has the part of the one that nobody is.
  c10::DataPtr allocate(std::size_t) override;
  void copy_data(void*, const void*, std::size_t) const override {}
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  c10::DataPtr unwatched() const { return {memory, context, &drop, device}; }
  c10::DataPtr watched() const { return {memory, context, &c10::impl::cow::cow_deleter, device}; }

  static void drop(void* context) { c10::impl::cow::cow_deleter(context); }
  static void delete_watch(void* watch) { delete static_cast<Watch*>(watch); }

  std::byte* memory;
  const c10::Device device;
  COWDeleterContext* context = nullptr;  // owns this object

 private:
  const BeforeWrite before_write_;
};

Watch* watch_of(c10::StorageImpl* storage) { return dynamic_cast<Watch*>(storage->allocator()); }

bool is_watched(c10::StorageImpl* storage) { return storage->data_ptr().get_deleter() == &c10::impl::cow::cow_deleter; }

// A storage that dies while it is watched leaves the owner that nobody is. They are let go when the next one is
// watched.
struct Watched {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  COWDeleterContext* context;
};

void let_dead_go(const Watched* added, const COWDeleterContext* removed) {
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::vector<Watched>;
  std::vector<COWDeleterContext*> dead;
  {
    const std::lock_guard lock(*mutex);
    std::erase_if(*all, [&](const Watched& each) {
      if (each.context == removed) return true;
      if (!each.storage.expired()) return false;
      dead.push_back(each.context);
      return true;
    });
    if (added != nullptr) all->push_back(*added);
  }
  for (COWDeleterContext* context : dead) c10::impl::cow::cow_deleter(context);
}

c10::DataPtr Watch::allocate(std::size_t) {
  const BeforeWrite callback = before_write_;
  (*callback)();
  let_dead_go(nullptr, context);
  return unwatched();
}

#endif

}  // namespace

c10::Storage storage_over(std::byte* memory, std::int64_t num_bytes, c10::Device device,
                          const BeforeWrite& before_write) {
  c10::Allocator* allocator = nullptr;
  c10::DataPtr pointer(memory, device);
  if (before_write) {
#if NORIA_TORCH_AT_LEAST(2, 13)
    pointer = c10::DataPtr(memory, new BeforeWrite(before_write), &delete_callback, device);
#else
    auto* const watch = new Watch(memory, device, before_write);
    watch->context = new COWDeleterContext({watch, &Watch::delete_watch});
    pointer = watch->unwatched();
    allocator = watch;
#endif
  }
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), num_bytes,
                                                            std::move(pointer), allocator, /*resizable=*/false));
}

at::Tensor tensor_in(const c10::Storage& storage, std::int64_t offset, c10::Device device, at::ScalarType dtype,
                     at::IntArrayRef sizes, at::IntArrayRef strides, c10::DispatchKeySet more) {
  const at::NoGradGuard no_grad;
  const c10::DispatchKey own = c10::computeDispatchKey(dtype, c10::kStrided, device);
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(own) | more,
                                                             c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_storage_offset(offset);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

at::Tensor tensor_over(std::byte* memory, std::int64_t num_bytes, c10::Device device, at::ScalarType dtype,
                       at::IntArrayRef sizes, at::IntArrayRef strides, const BeforeWrite& before_write) {
  return tensor_in(storage_over(memory, num_bytes, device, before_write), 0, device, dtype, sizes, strides);
}

void give_memory(const c10::Storage& storage, c10::DataPtr&& memory) {
  unwatch(storage);
  storage.unsafeGetStorageImpl()->set_allocator(nullptr);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
}

#if NORIA_TORCH_AT_LEAST(2, 13)

void watch(const c10::Storage& storage) {
  c10::StorageImpl* watched = storage.unsafeGetStorageImpl();
  if (!watched->has_materializer()) watched->set_materializer(&on_first_write);
}

void unwatch(const c10::Storage& storage) {
  c10::StorageImpl* watched = storage.unsafeGetStorageImpl();
  if (watched->has_materializer()) watched->clear_materializer();
}

void move_storage(const c10::Storage& moved, std::byte* memory) {
  c10::StorageImpl* storage = moved.unsafeGetStorageImpl();
  const bool is_watched = storage->has_materializer();
  if (is_watched) storage->clear_materializer();
  c10::DataPtr& pointer = storage->_mutable_data_ptr_no_checks();
  const c10::DeleterFnPtr deleter = pointer.get_deleter();
  const c10::Device device = pointer.device();
  void* const owned = pointer.release_context();
  storage->set_data_ptr_noswap(c10::DataPtr(memory, owned, deleter, device));
  if (is_watched) storage->set_materializer(&on_first_write);
}

#else

void watch(const c10::Storage& storage) {
  c10::StorageImpl* const watched = storage.unsafeGetStorageImpl();
  if (is_watched(watched)) return;
  Watch* const watch = watch_of(watched);
  watch->context->increment_refcount();
  (void)watched->_mutable_data_ptr_no_checks().release_context();
  watched->set_data_ptr_noswap(watch->watched());
  const Watched added{c10::weak_intrusive_ptr<c10::StorageImpl>(storage.getWeakStorageImpl()), watch->context};
  let_dead_go(&added, nullptr);
}

void unwatch(const c10::Storage& storage) {
  c10::StorageImpl* const watched = storage.unsafeGetStorageImpl();
  if (!is_watched(watched)) return;
  Watch* const watch = watch_of(watched);
  (void)watched->_mutable_data_ptr_no_checks().release_context();
  watched->set_data_ptr_noswap(watch->unwatched());
  let_dead_go(nullptr, watch->context);
  c10::impl::cow::cow_deleter(watch->context);  // the owner that nobody is
}

void move_storage(const c10::Storage& moved, std::byte* memory) {
  c10::StorageImpl* const storage = moved.unsafeGetStorageImpl();
  Watch* const watch = watch_of(storage);
  if (watch == nullptr) {
    storage->set_data_ptr_noswap(c10::DataPtr(memory, storage->device()));
    return;
  }
  watch->memory = memory;
  const bool was_watched = is_watched(storage);
  (void)storage->_mutable_data_ptr_no_checks().release_context();
  storage->set_data_ptr_noswap(was_watched ? watch->watched() : watch->unwatched());
}

#endif

}  // namespace noria
