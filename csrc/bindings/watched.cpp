#include "bindings/watched.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

namespace noria {
namespace {

void delete_callback(void* context) { delete static_cast<BeforeWrite*>(context); }

#if NORIA_TORCH_AT_LEAST(2, 13)
void on_first_write(c10::StorageImpl* storage) {
  const BeforeWrite callback = *static_cast<BeforeWrite*>(storage->data_ptr().get_context());
  (*callback)();
}
#endif

}  // namespace

at::Tensor tensor_over(std::byte* memory, std::int64_t num_bytes, c10::Device device, at::ScalarType dtype,
                       at::IntArrayRef sizes, at::IntArrayRef strides, const BeforeWrite& before_write) {
  const at::NoGradGuard no_grad;
  c10::DataPtr pointer = before_write ? c10::DataPtr(memory, new BeforeWrite(before_write), &delete_callback, device)
                                      : c10::DataPtr(memory, device);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), num_bytes,
                                                       std::move(pointer), /*allocator=*/nullptr, /*resizable=*/false);
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(device))
      .set_(c10::Storage(std::move(storage)), 0, sizes, strides);
}

void watch([[maybe_unused]] const c10::Storage& storage) {
#if NORIA_TORCH_AT_LEAST(2, 13)
  c10::StorageImpl* watched = storage.unsafeGetStorageImpl();
  if (!watched->has_materializer()) watched->set_materializer(&on_first_write);
#endif
}

void unwatch([[maybe_unused]] const c10::Storage& storage) {
#if NORIA_TORCH_AT_LEAST(2, 13)
  c10::StorageImpl* watched = storage.unsafeGetStorageImpl();
  if (watched->has_materializer()) watched->clear_materializer();
#endif
}

void move_tensor(const at::Tensor& tensor, std::byte* memory) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
#if NORIA_TORCH_AT_LEAST(2, 13)
  const bool is_watched = storage->has_materializer();
  if (is_watched) storage->clear_materializer();
#endif
  c10::DataPtr& pointer = storage->_mutable_data_ptr_no_checks();
  const c10::DeleterFnPtr deleter = pointer.get_deleter();
  const c10::Device device = pointer.device();
  void* const owned = pointer.release_context();
  storage->set_data_ptr_noswap(c10::DataPtr(memory, owned, deleter, device));
#if NORIA_TORCH_AT_LEAST(2, 13)
  if (is_watched) storage->set_materializer(&on_first_write);
#endif
}

}  // namespace noria
