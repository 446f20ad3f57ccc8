#include "bindings/held_gradient.h"

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <string>

#include "bindings/torch_compat.h"

namespace noria {
namespace {

void delete_tensor(void* context) { delete static_cast<at::Tensor*>(context); }

/// True where `num_own` references are all there are. The Python object of a tensor outlives Python's last reference to
/// it for as long as we keep the tensor (every loop that calls `zero_grad` has made one), and counts as one more.
template <class Impl>
bool is_ours_alone(const Impl* impl, std::size_t use_count, std::size_t num_own) {
  if (use_count == num_own) return true;
#if NORIA_TORCH_AT_LEAST(2, 13)
  return use_count == num_own + 1 && impl->pyobj_slot()->has_unique_reference();
#else
  return false;
#endif
}

}  // namespace

HeldGradient::HeldGradient(std::byte* memory, std::int64_t num_bytes, c10::Device device, const at::Tensor& like,
                           std::function<void()> before_write, std::string why_dead)
    : memory_(memory),
      num_bytes_(num_bytes),
      device_(device),
      dtype_(like.scalar_type()),
      sizes_(like.sizes().vec()),
      strides_(like.strides().vec()),
      before_write_(std::make_shared<std::function<void()>>(std::move(before_write))),
      why_dead_(std::move(why_dead)),
      inner_(make(nullptr)) {}

at::Tensor HeldGradient::make(const BeforeWrite& before_write) const {
  return tensor_over(memory_, num_bytes_, device_, dtype_, sizes_, strides_, before_write);
}

const at::Tensor& HeldGradient::tensor() {
  if (!seen_.defined()) {
    seen_ = make(before_write_);
    storage_ = seen_.storage();
    if (!why_dead_.empty()) kill(why_dead_);
  }
  return seen_;
}

void HeldGradient::move_to(std::byte* memory) {
  memory_ = memory;
  move_tensor(inner_, memory);
}

bool HeldGradient::is(const at::Tensor& gradient) const {
  return shares_memory(gradient) && gradient.scalar_type() == dtype_ && gradient.storage_offset() == 0 &&
         gradient.sizes() == sizes_ && gradient.strides() == strides_ && !gradient.is_conj() && !gradient.is_neg();
}

bool HeldGradient::shares_memory(const at::Tensor& gradient) const {
  return seen_.defined() && gradient.defined() && gradient.has_storage() &&
         gradient.storage().unsafeGetStorageImpl() == storage_.unsafeGetStorageImpl();
}

void HeldGradient::reuse(const at::Tensor& current_gradient) {
  if (!why_dead_.empty() || !seen_.defined() || is(current_gradient)) return;
  c10::StorageImpl* storage = storage_.unsafeGetStorageImpl();
  const bool alone = is_ours_alone(seen_.unsafeGetTensorImpl(), seen_.use_count(), 1) && shares_memory(seen_) &&
                     is_ours_alone(storage, storage_.use_count(), 2);  // ours, and seen_'s
  if (!alone) {
    auto* copy = new at::Tensor(inner_.clone());
    void* data = copy->mutable_data_ptr();
    storage->set_data_ptr_noswap(c10::DataPtr(data, copy, &delete_tensor, device_));
  }
  unwatch(storage_);
  if (kStorageCanRefuse && alone) return;  // nobody has it: it can be shown again
  seen_ = at::Tensor();
}

void HeldGradient::guard() {
  if (seen_.defined()) watch(storage_);
}

void HeldGradient::kill(const std::string& why) {
  if (seen_.defined()) storage_.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(why);
}

}  // namespace noria
