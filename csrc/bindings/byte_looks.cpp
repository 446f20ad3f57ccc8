#include "bindings/byte_looks.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <utility>

namespace noria {
namespace {

constexpr std::int64_t kColumns = 4099;
constexpr std::int64_t kWord = 8;  // bytes

/// Neither autograd nor the user's dispatch modes see what runs meanwhile.
struct Unseen {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_modes{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

}  // namespace

ByteLooks::Sums ByteLooks::sums_of(const at::Tensor& bytes) {
  const std::int64_t rows = bytes.numel() / (kColumns * kWord);
  const std::int64_t whole = rows * kColumns * kWord;
  return {bytes.narrow(0, 0, whole).view(at::kLong).view({rows, kColumns}).sum(0),
          bytes.narrow(0, whole, bytes.numel() - whole).clone()};
}

void ByteLooks::begin(UnitId unit, const at::Tensor& bytes) {
  const Unseen unseen;
  sums_[unit] = sums_of(bytes);
}

void ByteLooks::end(UnitId unit, const at::Tensor& bytes) {
  const Unseen unseen;
  const Sums before = *std::exchange(sums_[unit], std::nullopt);
  const Sums after = sums_of(bytes);
  const at::Tensor is_changed = before.columns.ne(after.columns).any().logical_or(before.rest.ne(after.rest).any());
  const MutexLock lock(mutex_);
  if (answers_.empty()) answers_.push_back(at::empty({}, at::TensorOptions(at::kBool).pinned_memory(true)));
  Pending look{unit, answers_.back(), c10::Event(device_.type())};
  answers_.pop_back();
  look.answer.copy_(is_changed, /*non_blocking=*/true);
  look.event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  pending_.push_back(std::move(look));
}

std::vector<UnitId> ByteLooks::changed(bool waits) {
  const MutexLock lock(mutex_);
  std::vector<UnitId> found;
  try {
    if (waits && !pending_.empty()) pending_.back().event.synchronize();
    while (!pending_.empty() && pending_.front().event.query()) {
      const Pending look = std::move(pending_.front());
      pending_.pop_front();
      if (look.answer.const_data_ptr<bool>()[0]) found.push_back(look.unit);
      answers_.push_back(look.answer);
    }
  } catch (const c10::Error&) {  // the device has failed, and its next call says so; the home can still be read
    pending_.clear();
  }
  return found;
}

}  // namespace noria
