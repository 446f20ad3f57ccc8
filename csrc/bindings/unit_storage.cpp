#include "bindings/unit_storage.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Storage.h>

#include <functional>

#include "bindings/watched.h"

namespace noria {
namespace {

BeforeWrite sets(const std::shared_ptr<bool>& flag) {
  return std::make_shared<std::function<void()>>([flag] { *flag = true; });
}

}  // namespace

UnitStorage::UnitStorage(std::int64_t num_bytes, c10::Device device, std::string evicted_message)
    : is_written_(std::make_shared<bool>(false)),
      storage_(storage_over(nullptr, num_bytes, device, sets(is_written_))),
      device_(device),
      evicted_message_(std::move(evicted_message)) {
  evict();
}

void UnitStorage::attach(std::byte* memory) {
  allow_access(storage_);
  move_storage(storage_, memory);
  *is_written_ = is_told_ = false;
  watch(storage_);
  attached_ = true;
}

bool UnitStorage::written() const { return attached_ && (*is_written_ || is_told_); }

at::Tensor UnitStorage::bytes(Bytes begin, Bytes bytes) const {
  auto* const memory = static_cast<std::byte*>(const_cast<void*>(storage_.data()));
  return tensor_over(memory + begin.count, bytes.count, device_, at::kByte, {bytes.count}, {1});
}

bool UnitStorage::covers(const void* memory) const {
  if (!attached_) return false;
  const auto* const begin = static_cast<const std::byte*>(storage_.data());
  const std::less<const void*> is_before;
  return !is_before(memory, begin) && is_before(memory, begin + storage_.nbytes());
}

void UnitStorage::evict() {
  if (!attached_) return;
  unwatch(storage_);
  move_storage(storage_, nullptr);
  refuse_access(storage_, evicted_message_);
  attached_ = false;
}

void UnitStorage::refuse_with(std::string message) {
  evicted_message_ = std::move(message);
  if (!attached_) refuse_access(storage_, evicted_message_);
}

at::Tensor UnitStorage::view(at::ScalarType dtype, std::int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides,
                             c10::DispatchKeySet more) const {
  return tensor_in(storage_, offset / static_cast<std::int64_t>(c10::elementSize(dtype)), device_, dtype, sizes,
                   strides, more);
}

}  // namespace noria
