// Copies, as torch's CUDA code makes them (aten/src/ATen/native/cuda/Copy.cu): between host and device always bytes, by
// way of temporaries where types or layouts differ, and waited for unless `non_blocking`; on one device by a copy
// engine, or by a kernel where types or layouts differ; between devices behind both of their streams.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <memory>
#include <vector>

#include "operand.h"
#include "pinned.h"
#include "settings.h"
#include "streams.h"

namespace pretend_gpu {
namespace {

// As launches are counted and reported.
const std::string kUp = "copy up", kDown = "copy down", kOnDevice = "copy on device", kKernel = "copy_";

/// One run of bytes in the same order on both sides.
bool is_plain(const at::Tensor& to, const at::Tensor& from) {
  if (to.scalar_type() != from.scalar_type()) return false;
  if (to.is_contiguous() && from.is_contiguous()) return true;
  return to.strides() == from.strides() && to.is_non_overlapping_and_dense();
}

void* reached(const Operand& operand) {
  void* const memory = fake_cuda::reach(operand.data, operand.extent);
  TORCH_CHECK(memory != nullptr, "an illegal memory access: ", operand.extent, " bytes at ",
              static_cast<const void*>(operand.data), " were freed before the copy came to them");
  return memory;
}

/// By a copy engine: not as a kernel that reads or writes over the link.
void copy_bytes(const c10::Stream& stream, const std::string& name, const Operand& to, const Operand& from) {
  launch_on(stream, name, [to, from] { std::memcpy(reached(to), reached(from), from.extent); });
}

void copy_by_kernel(const c10::Stream& stream, const Operand& to, const Operand& from, bool peers) {
  const int device = stream.device_index();
  const bool writes_link = check_reachable(to, device, kKernel, peers),
             reads_link = check_reachable(from, device, kKernel, peers);
  const auto bytes = [](const Operand& operand) {
    std::int64_t count = 1;
    for (const std::int64_t size : operand.sizes) count *= size;
    return count * static_cast<std::int64_t>(c10::elementSize(operand.dtype));
  };
  if (writes_link || reads_link) launches().crossed_link(reads_link ? bytes(from) : 0, writes_link ? bytes(to) : 0);
  launch_on(stream, kKernel, [to, from] {
    use_threads();
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    Aliases aliases;
    aliases.of(to).copy_(aliases.of(from));
  });
}

void copy_on_device(const at::Tensor& to, const at::Tensor& from) {
  const c10::DeviceGuard guard(from.device());
  const c10::Stream stream = current_stream(-1);
  const bool peers = to.device() != from.device();
  const auto order = [](const c10::Stream& first, const c10::Stream& second) {
    cudaEvent_t event = make_event(first.device_index());
    record_event(event, first);
    wait_event(event, second);
    check(cudaEventDestroy(event), "cudaEventDestroy");
  };
  const c10::Stream other = current_stream(to.device().index());
  if (peers) order(other, stream);
  const Operand source = operand_of(from, Access::read), target = operand_of(to, Access::write);
  if (is_plain(to, from)) {
    check_reachable(source, stream.device_index(), kKernel, peers);
    check_reachable(target, stream.device_index(), kKernel, peers);
    copy_bytes(stream, kOnDevice, target, source);
  } else {
    copy_by_kernel(stream, target, source, peers);
  }
  if (peers) order(stream, other);
}

/// A host tensor by its address: its memory is pinned, or waited for, or copied at once.
Operand host_operand(const at::Tensor& tensor, bool is_written) {
  Operand operand;
  operand.is_defined = true;
  operand.data =
      static_cast<std::byte*>(is_written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr()));
  operand.extent = tensor.nbytes();
  return operand;
}

/// From memory that is not pinned, by way of a buffer of the driver's.
void copy_staged_up(const c10::Stream& stream, const Operand& to, const Operand& from) {
  auto staged = std::make_shared<std::vector<std::byte>>(from.data, from.data + from.extent);
  launch_on(stream, kUp, [to, staged] { std::memcpy(reached(to), staged->data(), staged->size()); });
}

/// To memory that is not pinned: only the caller keeps it alive, and he waits.
void copy_unpinned_down(const c10::Stream& stream, const Operand& to, const Operand& from) {
  launch_on(stream, kDown, [to, from] { std::memcpy(to.data, reached(from), from.extent); });
}

void copy_plain_between(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const bool is_up = to.is_cuda();
  const at::Tensor& on_device = is_up ? to : from;
  const at::Tensor& on_host = is_up ? from : to;
  const c10::Stream stream = current_stream(-1);
  const Operand device = operand_of(on_device, is_up ? Access::write : Access::read);
  check_reachable(device, stream.device_index(), is_up ? kUp : kDown);
  const Operand host = host_operand(on_host, !is_up);
  const bool pinned = fake_cuda::locate(host.data, host.extent).kind == fake_cuda::Place::Kind::registered;
  const bool waits = !non_blocking || !(pinned || is_up);
  if (waits) announce_wait();  // before anything is queued: it may raise, and then the memory is not kept
  if (pinned) {
    copy_bytes(stream, is_up ? kUp : kDown, is_up ? device : host, is_up ? host : device);
    if (non_blocking) used_on(host.data, stream);
  } else if (is_up) {
    copy_staged_up(stream, device, host);
  } else {
    copy_unpinned_down(stream, host, device);
  }
  if (waits) synchronize(stream);
}

void copy_between(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  TORCH_CHECK(to.is_cpu() || from.is_cpu(), "copy between ", to.device(), " and ", from.device());
  const c10::DeviceGuard guard(to.is_cuda() ? to.device() : from.device());
  if (is_plain(to, from)) {
    copy_plain_between(to, from, non_blocking);
    return;
  }
  // Types are converted before the way up, and after the way down.
  const bool is_up = to.is_cuda(), fits = to.is_contiguous() && (is_up || to.scalar_type() == from.scalar_type());
  const at::Tensor target = fits ? to
                                 : at::empty_like(to, to.options().dtype(is_up ? to.scalar_type() : from.scalar_type()),
                                                  at::MemoryFormat::Contiguous);
  const at::Tensor source = is_up ? from.to(to.scalar_type()).contiguous() : from.contiguous();
  copy_plain_between(target, source, non_blocking);
  if (!target.is_same(to)) to.copy_(target, non_blocking);
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (to.is_same(from)) return to;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  at::Tensor source = from.expand_as(to);
  if (source.is_conj()) source = source.resolve_conj();
  if (source.is_neg()) source = source.resolve_neg();
  if (to.numel() == 0) return to;
  if (to.is_cuda() && source.is_cuda()) copy_on_device(to, source);
  else copy_between(to, source, non_blocking);
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  return copy(target, from, non_blocking);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  const c10::DeviceGuard guard(tensor.device());
  const Operand operand = operand_of(tensor, Access::read);
  check_reachable(operand, current_device(), "item");
  launches().synchronized("_local_scalar_dense");
  announce_wait();
  synchronize(current_stream(-1));
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return at::_local_scalar_dense(Aliases().of(operand));
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", &copy);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
}

}  // namespace
}  // namespace pretend_gpu
