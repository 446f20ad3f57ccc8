#include "bindings/held_gradient.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>

#include "bindings/torch_compat.h"

namespace noria {
namespace {

using Callback = std::shared_ptr<std::function<void()>>;

void delete_callback(void* context) { delete static_cast<Callback*>(context); }
void delete_tensor(void* context) { delete static_cast<at::Tensor*>(context); }

#if NORIA_TORCH_AT_LEAST(2, 13)
void on_first_write(c10::StorageImpl* storage) {
  const Callback callback = *static_cast<Callback*>(storage->data_ptr().get_context());
  (*callback)();
}
#endif

}  // namespace

HeldGradient::HeldGradient(std::byte* memory, std::int64_t num_bytes, c10::Device device, const at::Tensor& like,
                           std::function<void()> before_write)
    : memory_(memory),
      num_bytes_(num_bytes),
      device_(device),
      dtype_(like.scalar_type()),
      sizes_(like.sizes().vec()),
      strides_(like.strides().vec()),
      before_write_(std::make_shared<std::function<void()>>(std::move(before_write))),
      inner_(make(/*seen_by_user=*/false)) {}

at::Tensor HeldGradient::make(bool seen_by_user) const {
  const at::NoGradGuard no_grad;
  c10::DataPtr pointer = seen_by_user ? c10::DataPtr(memory_, new Callback(before_write_), &delete_callback, device_)
                                      : c10::DataPtr(memory_, device_);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), num_bytes_,
                                                       std::move(pointer), /*allocator=*/nullptr, /*resizable=*/false);
  return at::empty({0}, at::TensorOptions().dtype(dtype_).device(device_))
      .set_(c10::Storage(std::move(storage)), 0, sizes_, strides_);
}

const at::Tensor& HeldGradient::tensor() {
  if (!seen_.defined()) seen_ = make(/*seen_by_user=*/true);
  return seen_;
}

bool HeldGradient::is(const at::Tensor& gradient) const {
  return seen_.defined() && gradient.defined() && gradient.has_storage() &&
         gradient.storage().unsafeGetStorageImpl() == seen_.storage().unsafeGetStorageImpl();
}

void HeldGradient::reuse(const at::Tensor& current_gradient) {
  if (!seen_.defined() || is(current_gradient)) return;
  c10::StorageImpl* storage = seen_.storage().unsafeGetStorageImpl();
  const bool alone = seen_.use_count() == 1 && seen_.storage().use_count() == 1;
  if (!alone) {
    auto* copy = new at::Tensor(inner_.clone());
    void* data = copy->mutable_data_ptr();
    storage->set_data_ptr_noswap(c10::DataPtr(data, copy, &delete_tensor, device_));
  }
#if NORIA_TORCH_AT_LEAST(2, 13)
  if (storage->has_materializer()) storage->clear_materializer();
  if (alone) return;  // nobody has it: it can be shown again
#endif
  seen_ = at::Tensor();
}

void HeldGradient::guard() {
#if NORIA_TORCH_AT_LEAST(2, 13)
  if (!seen_.defined()) return;
  c10::StorageImpl* storage = seen_.storage().unsafeGetStorageImpl();
  if (!storage->has_materializer()) storage->set_materializer(&on_first_write);
#endif
}

void HeldGradient::kill() {
  if (!seen_.defined()) return;
  seen_.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      std::string("expected a gradient that was cleared after optimizer.step(); found the old one in use; remedy: call "
                  "optimizer.zero_grad() before reading or accumulating gradients again, or use torch >= 2.13"));
}

}  // namespace noria
