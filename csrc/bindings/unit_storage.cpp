#include "bindings/unit_storage.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/core/Storage.h>

#include "bindings/torch_compat.h"
#include "bindings/watched.h"

namespace noria {
namespace {

#if NORIA_TORCH_AT_LEAST(2, 13)
void notice(c10::StorageImpl*) {}  // torch forgets a materializer once it has run: that it is gone is the notice
#endif

}  // namespace

UnitStorage::UnitStorage(std::int64_t num_bytes, c10::Device device, std::string evicted_message, std::byte* nan_range)
    : storage_(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), num_bytes,
                                                     c10::DataPtr(nan_range, device), /*allocator=*/nullptr,
                                                     /*resizable=*/false)),
      device_(device),
      evicted_message_(std::move(evicted_message)),
      nan_range_(nan_range) {
  evict();
}

void UnitStorage::attach(std::byte* memory) {
#if NORIA_TORCH_AT_LEAST(2, 13)
  storage_->clear_data_ptr_access_error_msg_();
  storage_->set_data_ptr_noswap(c10::DataPtr(memory, device_));
  if (!storage_->has_materializer()) storage_->set_materializer(&notice);
#else
  storage_->set_data_ptr_noswap(c10::DataPtr(memory, device_));
#endif
  attached_ = true;
}

bool UnitStorage::written() const {
#if NORIA_TORCH_AT_LEAST(2, 13)
  return attached_ && !storage_->has_materializer();
#else
  return false;
#endif
}

bool UnitStorage::equals(std::byte* elsewhere) const {
  const auto num_bytes = static_cast<std::int64_t>(storage_->nbytes());
  const auto bytes = [&](const void* memory) {
    return tensor_over(static_cast<std::byte*>(const_cast<void*>(memory)), num_bytes, device_, at::kByte, {num_bytes},
                       {1}, nullptr);
  };
  return at::equal(bytes(storage_->data()), bytes(elsewhere));
}

void UnitStorage::evict() {
  if (!attached_) return;
#if NORIA_TORCH_AT_LEAST(2, 13)
  if (storage_->has_materializer()) storage_->clear_materializer();
#endif
  storage_->set_data_ptr_noswap(c10::DataPtr(nan_range_, device_));
#if NORIA_TORCH_AT_LEAST(2, 13)
  storage_->release_data_and_set_meta_custom_data_ptr_error_msg_(evicted_message_);
#endif
  attached_ = false;
}

at::Tensor UnitStorage::view(at::ScalarType dtype, std::int64_t offset, at::IntArrayRef sizes,
                             at::IntArrayRef strides) const {
  const at::NoGradGuard no_grad;
#if NORIA_TORCH_AT_LEAST(2, 13)
  if (!attached_) storage_->clear_data_ptr_access_error_msg_();  // set_ looks at the pointer
#endif
  const auto options = at::TensorOptions().dtype(dtype).device(device_);
  at::Tensor made =
      at::empty({0}, options)
          .set_(c10::Storage(storage_), offset / static_cast<std::int64_t>(c10::elementSize(dtype)), sizes, strides);
#if NORIA_TORCH_AT_LEAST(2, 13)
  if (!attached_) storage_->release_data_and_set_meta_custom_data_ptr_error_msg_(evicted_message_);
#endif
  return made;
}

}  // namespace noria
