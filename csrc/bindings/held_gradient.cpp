#include "bindings/held_gradient.h"

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <string>

namespace noria {
namespace {

void delete_tensor(void* context) { delete static_cast<at::Tensor*>(context); }

/// Returns true if there are `num_own` references and no others. A tensor's Python object outlives Python's last
/// reference for as long as we keep the tensor, and counts as one more. Every loop that calls `zero_grad` has made such
/// an object.
template <class Impl>
bool is_ours_alone(const Impl* impl, std::size_t use_count, std::size_t num_own) {
  if (use_count == num_own) return true;
  return use_count == num_own + 1 && impl->pyobj_slot()->has_unique_reference();
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
      why_dead_(num_bytes > 0 ? std::move(why_dead) : std::string()),  // an empty gradient has no values to lose
      inner_(tensor_over(memory_, num_bytes_, device_, dtype_, sizes_, strides_)) {}

HeldGradient::~HeldGradient() {
  if (storage_) stop_listening(storage_);
}

void HeldGradient::listen(const std::shared_ptr<Listener>& listener, int number) {
  listener_ = listener;
  number_ = number;
}

at::Tensor HeldGradient::make() const {
  return listened_tensor_in(storage_over(memory_, num_bytes_, device_, before_write_), device_, dtype_, sizes_,
                            strides_);
}

const at::Tensor& HeldGradient::tensor() {
  if (!seen_.defined()) {
    seen_ = make();
    storage_ = seen_.unsafeGetTensorImpl()->unsafe_storage();
    if (const auto listener = listener_.lock(); listener && num_bytes_ > 0) noria::listen(storage_, listener, number_);
    if (is_dead()) kill(why_dead_);
  }
  return seen_;
}

void HeldGradient::move_to(std::byte* memory) {
  memory_ = memory;
  move_storage(inner_.storage(), memory);
}

bool HeldGradient::is(const at::Tensor& gradient) const {
  return shares_memory(gradient) && gradient.scalar_type() == dtype_ && gradient.storage_offset() == 0 &&
         gradient.sizes() == sizes_ && gradient.strides() == strides_ && !gradient.is_conj() && !gradient.is_neg();
}

bool HeldGradient::shares_memory(const at::Tensor& gradient) const {
  return seen_.defined() && gradient.defined() && gradient.has_storage() &&
         gradient.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage_.unsafeGetStorageImpl();
}

bool HeldGradient::is_private() const {
  if (!seen_.defined()) return true;
  const std::size_t own = shares_memory(seen_) ? 2 : 1;  // ours, and seen_'s
  return !is_taken_ && storage_.use_count() == own && !has_python_object(storage_);
}

void HeldGradient::reuse(const at::Tensor& current_gradient) {
  if (is_dead() || !seen_.defined() || is(current_gradient)) return;
  c10::StorageImpl* storage = storage_.unsafeGetStorageImpl();
  const bool alone = is_ours_alone(seen_.unsafeGetTensorImpl(), seen_.use_count(), 1) && shares_memory(seen_) &&
                     is_ours_alone(storage, storage_.use_count(), 2);  // ours, and seen_'s
  if (!alone) {
    auto* copy = new at::Tensor(inner_.clone());
    scale(*copy);
    void* data = copy->mutable_data_ptr();
    stop_listening(storage_);
    give_memory(storage_, c10::DataPtr(data, copy, &delete_tensor, device_));
  }
  scales_.clear();
  unwatch(storage_);
  const bool was_private = !is_taken_ && !has_python_object(storage_);
  // Only we have `seen_`, so `tensor` may show it again, unless the user has left it in another shape.
  if (alone && was_private && is(seen_) && !seen_.requires_grad()) return;
  stop_listening(storage_);
  seen_ = at::Tensor();
  is_taken_ = false;
}

void HeldGradient::guard() {
  if (seen_.defined() && !is_dead()) watch(storage_);
}

void HeldGradient::unguard() {
  if (seen_.defined() && !is_dead()) unwatch(storage_);
}

void HeldGradient::kill(const std::string& why) {
  if (seen_.defined()) refuse_access(storage_, why);
}

void HeldGradient::apply_scales() {
  if (scales_.empty()) return;
  scale(inner_);
  scales_.clear();
}

void HeldGradient::scale(const at::Tensor& target) const {
  for (const Scale& each : scales_) multiply_by(target, each);
}

}  // namespace noria
