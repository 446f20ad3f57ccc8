#include "operand.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "fake_cuda.h"
#include "settings.h"
#include "streams.h"

namespace pretend_gpu {
namespace {

std::size_t extent_of(const at::Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                          static_cast<std::size_t>(tensor.element_size()));
}

at::Tensor copy_of(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  at::Tensor copy = at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type());
  if (!tensor.is_contiguous()) copy.copy_(tensor);
  // Not clone(), which tests count.
  else if (tensor.nbytes() > 0) std::memcpy(copy.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

c10::Storage host_storage(void* base, std::size_t num_bytes) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), num_bytes, c10::DataPtr(base, c10::Device(c10::kCPU)), nullptr, false));
}

at::Tensor over(const c10::Storage& storage, const Operand& operand, std::int64_t offset) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(operand.dtype));
  made.unsafeGetTensorImpl()->set_storage_offset(offset);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(operand.sizes, operand.strides);
  if (operand.is_wrapped_number) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

template <class T>
void fill(void* memory, std::size_t num_bytes, T value) {
  for (std::size_t i = 0; i + sizeof(T) <= num_bytes; i += sizeof(T)) {
    std::memcpy(static_cast<std::byte*>(memory) + i, &value, sizeof(T));
  }
}

[[noreturn]] void raise_unreachable(const Operand& operand, const std::string& kernel, const std::string& what) {
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, cudaErrorIllegalAddress,
                              c10::str("CUDA error: an illegal memory access was encountered\n", kernel,
                                       " would touch ", operand.extent, " bytes at ",
                                       static_cast<const void*>(operand.data), ", ", what));
}

}  // namespace

Operand operand_of(const at::Tensor& tensor, Access access) {
  Operand operand;
  if (!tensor.defined()) return operand;
  operand.is_defined = true;
  operand.is_wrapped_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  operand.sizes = tensor.sizes().vec();
  operand.strides = tensor.strides().vec();
  operand.dtype = tensor.scalar_type();
  if (tensor.is_cpu()) {
    operand.value = copy_of(tensor);
    return operand;
  }
  operand.offset = tensor.storage_offset();
  operand.storage = tensor.storage().unsafeGetStorageImpl();
  operand.storage_bytes = tensor.storage().nbytes();
  if (tensor.numel() == 0) return operand;
  operand.extent = extent_of(tensor);
  const bool is_mutable = access == Access::write || settings().writes_everything;
  operand.data =
      static_cast<std::byte*>(is_mutable ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr()));
  return operand;
}

bool check_reachable(const Operand& operand, int device, const std::string& kernel, bool peers) {
  if (operand.extent == 0) return false;
  const fake_cuda::Place place = fake_cuda::locate(operand.data, operand.extent);
  switch (place.kind) {
  case fake_cuda::Place::Kind::unknown:
    raise_unreachable(operand, kernel,
                      "which are neither device memory nor registered host memory, or not all in one range of it");
  case fake_cuda::Place::Kind::registered:
    return true;
  case fake_cuda::Place::Kind::allocated:
  case fake_cuda::Place::Kind::opened:
    if (place.device != device && !peers) {
      raise_unreachable(operand, kernel, c10::str("memory of cuda:", place.device, ", on cuda:", device));
    }
    return false;
  }
  return false;
}

at::Tensor Aliases::of(const Operand& operand) {
  if (!operand.is_defined) return {};
  if (operand.is_on_host()) return operand.value;
  if (operand.extent == 0) return over(host_storage(nullptr, 0), operand, 0);
  auto* const data = static_cast<std::byte*>(fake_cuda::reach(operand.data, operand.extent));
  TORCH_CHECK(data != nullptr, "an illegal memory access: ", operand.extent, " bytes at ",
              static_cast<const void*>(operand.data),
              " were freed, closed or unregistered between the launch and the time when the stream came to it");
  std::byte* const base = data - operand.offset * static_cast<std::int64_t>(c10::elementSize(operand.dtype));
  c10::Storage& storage = storages_[{operand.storage, base}];
  if (!storage) storage = host_storage(base, operand.storage_bytes);
  return over(storage, operand, operand.offset);
}

at::Tensor dummy_of(const Operand& operand, int value) {
  if (!operand.is_defined) return {};
  if (operand.is_on_host()) return copy_of(operand.value);
  c10::Allocator* const allocator = c10::GetCPUAllocator();
  c10::DataPtr memory = allocator->allocate(operand.extent);
  if (operand.extent > 0) std::memset(memory.get(), 0, operand.extent);
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), operand.extent,
                                                             std::move(memory), allocator, true));
  at::Tensor made = over(storage, operand, 0);
  if (value != 0 && operand.extent > 0) {
    void* const bytes = storage.mutable_data();
    if (operand.dtype == at::kLong) fill<std::int64_t>(bytes, operand.extent, value);
    else if (operand.dtype == at::kInt) fill<std::int32_t>(bytes, operand.extent, value);
    else if (operand.dtype == at::kFloat) fill<float>(bytes, operand.extent, static_cast<float>(value));
    else if (operand.dtype == at::kDouble) fill<double>(bytes, operand.extent, value);
    else if (c10::elementSize(operand.dtype) == 1) std::memset(bytes, value, operand.extent);
  }
  return made;
}

void use_threads() {
  static thread_local int used = 0;
  const int wanted = settings().threads;
  if (used != wanted) at::set_num_threads(used = wanted);
}

}  // namespace pretend_gpu
