#include "storage_ops.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/fill.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <limits>

#include "allocator.h"
#include "streams.h"

namespace pretend_gpu {
namespace {

c10::Device device_or_current(std::optional<c10::Device> device) {
  const int index = device && device->has_index() ? device->index() : current_device();
  TORCH_CHECK(index < fake_cuda::kNumDevices, "CUDA error: invalid device ordinal");
  return device_of(index);
}

/// As torch does where deterministic algorithms are asked for: what was never written is NaN, or the largest number.
void fill_undefined(const at::Tensor& tensor) {
  const at::Context& context = at::globalContext();
  if (!context.deterministicAlgorithms() || !context.deterministicFillUninitializedMemory()) return;
  if (tensor.numel() == 0) return;
  const c10::ScalarType type = tensor.scalar_type();
  if (tensor.is_floating_point() || tensor.is_complex()) tensor.fill_(std::numeric_limits<double>::quiet_NaN());
  else if (type == at::kBool) tensor.fill_(true);
  else if (type == at::kByte) tensor.fill_(std::numeric_limits<std::uint8_t>::max());
  else if (type == at::kChar) tensor.fill_(std::numeric_limits<std::int8_t>::max());
  else if (type == at::kShort) tensor.fill_(std::numeric_limits<std::int16_t>::max());
  else if (type == at::kInt) tensor.fill_(std::numeric_limits<std::int32_t>::max());
  else if (type == at::kLong) tensor.fill_(std::numeric_limits<std::int64_t>::max());
}

void refuse_pinned(std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> device, std::optional<bool> pin_memory,
                 std::optional<at::MemoryFormat> format) {
  refuse_pinned(pin_memory);
  const c10::DeviceGuard guard(device_or_current(device));
  at::Tensor made =
      at::detail::empty_generic(sizes, &allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
  fill_undefined(made);
  return made;
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  refuse_pinned(pin_memory);
  const c10::DeviceGuard guard(device_or_current(device));
  at::Tensor made = at::detail::empty_strided_generic(sizes, strides, &allocator(), c10::DispatchKeySet(kKey),
                                                      c10::dtype_or_default(dtype));
  fill_undefined(made);
  return made;
}

void grow_for(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  const c10::DeviceGuard guard(tensor.device());
  grow(*tensor.storage().unsafeGetStorageImpl(),
       at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                        static_cast<std::size_t>(tensor.element_size()),
                                        static_cast<std::size_t>(tensor.storage_offset())));
}

const at::Tensor& resize_(const at::Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  if (tensor.sizes() != sizes || format) {
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(sizes);
    if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
    grow_for(tensor);
  }
  return tensor;
}

at::Tensor& set_storage_offset(at::Tensor& tensor, at::Storage storage, std::int64_t offset, at::IntArrayRef sizes,
                               at::IntArrayRef strides) {
  at::native::checkSetStorage(tensor, std::move(storage), offset, sizes, strides);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (strides.data() != nullptr && strides.size() == sizes.size()) impl->set_sizes_and_strides(sizes, strides);
  else impl->set_sizes_contiguous(sizes);
  grow_for(tensor);
  return tensor;
}

at::Tensor& set_nothing(at::Tensor& tensor) {
  const c10::DeviceGuard guard(tensor.device());
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                             allocator().allocate(0), &allocator(), true));
  return set_storage_offset(tensor, std::move(storage), 0, {0}, {});
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  allocator().recordStream(tensor.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &set_nothing);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("record_stream", &record_stream);
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
}

}  // namespace

void resize_storage(c10::StorageImpl& storage, std::size_t num_bytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  const c10::DeviceGuard guard(storage.device());
  if (num_bytes == 0) {
    storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
    storage.set_nbytes(0);
    return;
  }
  c10::DataPtr other = allocator().allocate(num_bytes);
  const std::size_t kept = std::min(num_bytes, storage.nbytes());
  if (storage.data_ptr() && kept > 0) {
    const OnDevice on(storage.device().index());
    check(cudaMemcpyAsync(other.get(), storage.data(), kept, cudaMemcpyDeviceToDevice, native(current_stream(-1))),
          "cudaMemcpyAsync");
  }
  storage.set_data_ptr_noswap(std::move(other));
  storage.set_nbytes(num_bytes);
}

void grow(c10::StorageImpl& storage, std::size_t num_bytes) {
  if (num_bytes > storage.nbytes()) resize_storage(storage, num_bytes);
}

}  // namespace pretend_gpu
