#include "bindings/saved_tensors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DispatchKey.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <utility>

namespace noria {
namespace {

void check_version(at::IntArrayRef sizes, std::uint32_t found, std::uint32_t expected) {
  TORCH_CHECK(found == expected,
              "one of the variables needed for gradient computation has been modified by an inplace operation: a "
              "tensor of shape ",
              sizes, " is at version ", found, "; expected version ", expected, " instead.");
}

}  // namespace

SavedStorage::~SavedStorage() {
  const MutexLock lock(dropped->mutex);
  dropped->saved.push_back(saved);
}

SavedTensors::SavedTensors(c10::Device device, Bytes least, Tells keeps, Tells is_attached)
    : device_(device),
      least_(least),
      keeps_(std::move(keeps)),
      is_attached_(std::move(is_attached)) {}

// A view of a small part of a storage does not go: it would take the whole storage along.
bool SavedTensors::goes(const at::Tensor& tensor) const {
  if (tensor.layout() != at::kStrided || tensor.device() != device_ || tensor.is_quantized() || tensor.is_inference())
    return false;
  if (tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python)) return false;
  const auto whole = static_cast<std::int64_t>(tensor.storage().nbytes());
  return whole >= least_.count && whole <= 4 * tensor.numel() * tensor.element_size() && !keeps_(tensor.storage());
}

at::Tensor SavedTensors::weight_of(const at::Tensor& tensor) const {
  const at::Tensor cast = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
  const auto& node = cast.grad_fn();
  if (!node || node->num_outputs() != 1) return {};
  const auto* const leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node->next_edge(0).function.get());
  if (leaf == nullptr || node->name() != "ToCopyBackward0") return {};
  const at::Tensor& weight = leaf->variable;
  const bool is_whole = cast.sizes() == weight.sizes() && cast.strides() == weight.strides() &&
                        cast.storage_offset() == 0 && cast._version() == 0;
  return is_whole && is_attached_(weight.storage()) ? weight : at::Tensor();
}

std::shared_ptr<SavedTensor> SavedTensors::pack(Engine& engine, const at::Tensor& tensor) {
  forget_dropped(engine);
  const auto result = std::make_shared<SavedTensor>();
  result->counter = tensor.unsafeGetTensorImpl()->version_counter();
  result->version = result->counter.current_version();
  if (!goes(tensor)) {
    result->kept = tensor.detach();
    return result;
  }
  const c10::Storage& storage = tensor.storage();
  result->dtype = tensor.scalar_type();
  result->sizes = tensor.sizes().vec();
  result->strides = tensor.strides().vec();
  result->offset = tensor.storage_offset();
  if (at::Tensor weight = weight_of(tensor); weight.defined()) {
    result->weight_version = weight._version();
    result->weight = std::move(weight);
    return result;
  }
  const auto known = known_.find(storage.unsafeGetStorageImpl());
  if (known != known_.end() && !known->second.storage.expired() && known->second.version == result->version) {
    result->storage = known->second.saved.lock();
  }
  if (result->storage) {
    engine.activations()->share(result->storage->saved);
    return result;
  }
  const SavedId saved = engine.activations()->save(static_cast<const std::byte*>(storage.data()),
                                                   Bytes{static_cast<std::int64_t>(storage.nbytes())});
  storages_.emplace(saved, storage);
  result->storage = std::make_shared<const SavedStorage>(saved, dropped_);
  known_.insert_or_assign(
      storage.unsafeGetStorageImpl(),
      Known{c10::weak_intrusive_ptr<c10::StorageImpl>(
                c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(storage.unsafeGetStorageImpl())),
            result->storage, result->version});
  return result;
}

at::Tensor SavedTensors::unpack(Engine& engine, const SavedTensor& saved, Stream stream) {
  const at::IntArrayRef sizes = saved.kept.defined() ? saved.kept.sizes() : at::IntArrayRef(saved.sizes);
  check_version(sizes, saved.counter.current_version(), saved.version);
  forget_dropped(engine);
  if (saved.kept.defined()) return saved.kept;
  const auto view_of = [&](const c10::Storage& storage) {
    return at::empty({0}, at::TensorOptions().dtype(saved.dtype).device(device_))
        .set_(storage, saved.offset, saved.sizes, saved.strides);
  };
  if (saved.weight.defined()) {
    check_version(saved.weight.sizes(), saved.weight._version(), saved.weight_version);
    const at::NoGradGuard no_grad;
    return view_of(saved.weight.to(saved.dtype, /*non_blocking=*/false, /*copy=*/true).storage());
  }
  engine.await_saved(saved.storage->saved, stream);
  return view_of(storages_.at(saved.storage->saved));
}

std::byte* SavedTensors::make_room(SavedId saved, Bytes bytes, bool poisoned) {
  const at::Tensor room = at::empty({bytes.count}, at::TensorOptions().dtype(at::kByte).device(device_));
  if (poisoned) room.fill_(0xff);
  storages_.insert_or_assign(saved, room.storage());
  return static_cast<std::byte*>(room.storage().mutable_data());
}

void SavedTensors::fill(SavedId saved, const std::byte* from, Bytes bytes) {
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(at::kByte);
  at::Tensor to = at::empty({0}, options.device(device_)).set_(storages_.at(saved), 0, {bytes.count}, {1});
  to.copy_(at::from_blob(const_cast<std::byte*>(from), {bytes.count}, options));
}

void SavedTensors::forget_dropped(Engine& engine) {
  std::vector<SavedId> saved;
  {
    const MutexLock lock(dropped_->mutex);
    saved.swap(dropped_->saved);
  }
  if (saved.empty()) return;
  const auto activations = engine.activations();
  for (SavedId each : saved) activations->forget(each);
  std::erase_if(known_, [](const auto& item) { return item.second.saved.expired(); });
}

}  // namespace noria
