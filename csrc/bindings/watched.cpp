#include "bindings/watched.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/COWDeleter.h>

#include <cstdlib>
#include <string_view>
#include <utility>

#include "bindings/torch_compat.h"

namespace noria {

bool uses_lazy_copies() {
#if NORIA_TORCH_AT_LEAST(2, 13)
  static const bool asked_for = [] {
    const char* const value = std::getenv("NORIA_LAZY_COPIES");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return asked_for;
#else
  return true;
#endif
}

namespace {

using c10::impl::cow::cow_deleter;
using c10::impl::cow::COWDeleterContext;

class WatchedStorage;

/// Answers a lazy copy that asks for memory before its first write. torch releases the copy's share of the old memory,
/// and gets the same memory from here.
class SameMemory final : public c10::Allocator {
 public:
  explicit SameMemory(WatchedStorage& storage) : storage_(storage) {}

  c10::DataPtr allocate(std::size_t) override;
  void copy_data(void*, const void*, std::size_t) const override {}
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

 private:
  WatchedStorage& storage_;
};

// WatchedStorage calls back before a write. Its data pointer owns nothing, unless it is watched as a lazy copy. Then
// the pointer owns one part of `shared_` and this object the other, so to torch the memory has another owner.
class WatchedStorage final : public c10::StorageImpl {
 public:
  WatchedStorage(std::byte* memory, std::int64_t num_bytes, c10::Device device, BeforeWrite before_write)
      : c10::StorageImpl(use_byte_size_t(), num_bytes, c10::DataPtr(memory, device), nullptr, /*resizable=*/false),
        before_write_(std::move(before_write)) {}
  ~WatchedStorage() override {
    if (shared_ != nullptr) cow_deleter(shared_);
  }
  WatchedStorage(const WatchedStorage&) = delete;  // its address is watched
  WatchedStorage& operator=(const WatchedStorage&) = delete;

  void watch() {
    if (!before_write_ || is_watched()) return;
    if (uses_lazy_copies()) be_a_copy();
#if NORIA_TORCH_AT_LEAST(2, 13)
    else set_materializer(&WatchedStorage::on_first_write);
#endif
  }

  void unwatch() {
    if (!is_watched()) return;
    if (is_copy()) be_no_copy();
#if NORIA_TORCH_AT_LEAST(2, 13)
    clear_materializer();
#endif
  }

  void move(std::byte* memory) {
    const bool was_watched = is_watched();
    unwatch();
    set_data_ptr_noswap(c10::DataPtr(memory, _mutable_data_ptr_no_checks().device()));
    if (was_watched) watch();
  }

  void give_memory(c10::DataPtr&& memory) {
    unwatch();
    before_write_ = nullptr;
    set_allocator(nullptr);
    set_data_ptr_noswap(std::move(memory));
  }

  /// Called when torch wants memory to copy to.
  c10::DataPtr memory_to_write() {
    is_asked_ = true;
    try {
      call_back();
    } catch (...) {
      is_asked_ = false;
      if (is_copy()) shared_->increment_refcount();  // torch has released it, but it stays
      throw;
    }
    is_asked_ = false;
    const c10::DataPtr& pointer = _mutable_data_ptr_no_checks();
    return {pointer.get(), pointer.device()};
  }

 private:
  void call_back() const {
    const BeforeWrite callback = before_write_;  // the member may be reset meanwhile
    if (callback) (*callback)();
  }

  bool is_copy() { return _mutable_data_ptr_no_checks().get_deleter() == &cow_deleter; }

  bool is_watched() {
#if NORIA_TORCH_AT_LEAST(2, 13)
    return has_materializer();
#else
    return is_copy();
#endif
  }

  // While torch asks for memory, it has released the pointer's part already.
  void be_a_copy() {
    if (shared_ == nullptr) shared_ = new COWDeleterContext({this, [](void*) {}});
    if (!is_asked_) shared_->increment_refcount();
    set_allocator(&allocator_);
    c10::DataPtr& pointer = _mutable_data_ptr_no_checks();
    set_data_ptr_noswap(c10::DataPtr(pointer.mutable_get(), shared_, &cow_deleter, pointer.device()));
#if NORIA_TORCH_AT_LEAST(2, 13)
    set_materializer(&c10::impl::cow::materialize_cow);
#endif
  }

  void be_no_copy() {
    c10::DataPtr& pointer = _mutable_data_ptr_no_checks();
    c10::DataPtr plain(pointer.mutable_get(), pointer.device());
    if (is_asked_) (void)pointer.release_context();
    set_data_ptr_noswap(std::move(plain));
  }

#if NORIA_TORCH_AT_LEAST(2, 13)
  static void on_first_write(c10::StorageImpl* storage) { static_cast<WatchedStorage*>(storage)->call_back(); }
#endif

  BeforeWrite before_write_;
  SameMemory allocator_{*this};
  COWDeleterContext* shared_ = nullptr;  // null: never watched as a lazy copy
  bool is_asked_ = false;                // torch is asking for memory
};

c10::DataPtr SameMemory::allocate(std::size_t) { return storage_.memory_to_write(); }

WatchedStorage* watched(const c10::Storage& storage) {
  return dynamic_cast<WatchedStorage*>(storage.unsafeGetStorageImpl());
}

/// Moves a storage that can never be watched. It keeps what it owns.
void move_plain(c10::StorageImpl* storage, std::byte* memory) {
  c10::DataPtr& pointer = storage->_mutable_data_ptr_no_checks();
  const c10::DeleterFnPtr deleter = pointer.get_deleter();
  const c10::Device device = pointer.device();
  storage->set_data_ptr_noswap(c10::DataPtr(memory, pointer.release_context(), deleter, device));
}

}  // namespace

c10::Storage storage_over(std::byte* memory, std::int64_t num_bytes, c10::Device device,
                          const BeforeWrite& before_write) {
  if (before_write) return c10::Storage(c10::make_intrusive<WatchedStorage>(memory, num_bytes, device, before_write));
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), num_bytes,
                                                            c10::DataPtr(memory, device), nullptr,
                                                            /*resizable=*/false));
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

bool has_python_object(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()->pyobj_slot()->load_pyobj() != nullptr;
}

void watch(const c10::Storage& storage) {
  if (WatchedStorage* const found = watched(storage)) found->watch();
}

void unwatch(const c10::Storage& storage) {
  if (WatchedStorage* const found = watched(storage)) found->unwatch();
}

void give_memory(const c10::Storage& storage, c10::DataPtr&& memory) {
  if (WatchedStorage* const found = watched(storage)) found->give_memory(std::move(memory));
  else storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
}

void move_storage(const c10::Storage& storage, std::byte* memory) {
  if (WatchedStorage* const found = watched(storage)) found->move(memory);
  else move_plain(storage.unsafeGetStorageImpl(), memory);
}

void refuse_access(const c10::Storage& storage, const std::string& why) {
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(why);
}

#if NORIA_TORCH_AT_LEAST(2, 12)

void allow_access(const c10::Storage& storage) { storage.unsafeGetStorageImpl()->clear_data_ptr_access_error_msg_(); }

#else

// Torch 2.11 can refuse access, but has no call that allows it again. Its flag is private, but the arguments of an
// explicit instantiation may name private members ([temp.spec.general]). No release of 2.11 will change.
namespace {

using Flag = bool c10::StorageImpl::*;
Flag refuses();

template <Flag flag>
struct Named {
  friend Flag refuses() { return flag; }
};
template struct Named<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

void allow_access(const c10::Storage& storage) {
  c10::StorageImpl* const allowed = storage.unsafeGetStorageImpl();
  allowed->*refuses() = false;
  c10::DataPtr same = std::move(allowed->_mutable_data_ptr_no_checks());
  allowed->set_data_ptr_noswap(std::move(same));  // makes torch read its flags again
}

#endif

}  // namespace noria
