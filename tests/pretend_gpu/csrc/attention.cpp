// Attention and dropout: composed on the device of what is there, by the rules of the CPU, so that bits can be
// compared. torch's CUDA has kernels of its own for both.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <limits>

#include "streams.h"

namespace pretend_gpu {
namespace {

constexpr std::int64_t kFlash = 1;  // sdp::SDPBackend::flash_attention

/// Geometry without memory, and real where the caller's tensors are only a compiler's.
at::Tensor on_cpu(const at::Tensor& tensor) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(tensor.sym_sizes());
  const auto strides = C10_AS_INTARRAYREF_SLOW(tensor.sym_strides());
  at::Tensor made = at::detail::empty_strided_cpu(sizes, strides, tensor.scalar_type());
  return made.requires_grad_(tensor.requires_grad());
}

/// Which kernel the CPU would take: out of reach of the operator that the caller dispatches to.
std::int64_t choice_of_cpu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const std::optional<at::Tensor>& mask, double dropout, bool is_causal,
                           std::optional<double> scale, bool enable_gqa) {
  const c10::impl::ForceDispatchKeyGuard alone(c10::DispatchKeySet(),
                                               c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  return at::_fused_sdp_choice(on_cpu(query), on_cpu(key), on_cpu(value),
                               mask && mask->defined() ? std::optional(on_cpu(*mask)) : std::nullopt, dropout,
                               is_causal, scale, enable_gqa);
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout, bool is_causal, std::optional<double> scale,
                     bool enable_gqa) {
  const bool has_mask = mask && mask->defined();
  const std::int64_t choice = choice_of_cpu(query, key, value, mask, dropout, is_causal, scale, enable_gqa);
  std::optional<at::Tensor> added = mask;
  if (has_mask && mask->scalar_type() == at::kBool) {
    added = at::where(mask->logical_not(), -std::numeric_limits<double>::infinity(),
                      at::zeros_like(*mask, query.options()));
  }
  if (choice == kFlash) {
    return std::get<0>(
        at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, added, scale));
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, added, dropout, is_causal, std::nullopt,
                                                            scale, enable_gqa));
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const auto as_mask = input.options().dtype(at::kBool);
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, as_mask)};
  if (p == 1) return {at::zeros_like(input), at::zeros_like(input, as_mask)};
  const at::Tensor mask = at::empty_like(input, as_mask).bernoulli_(1 - p);
  return {input.mul(mask).mul_(1 / (1 - p)), mask};
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("scaled_dot_product_attention", &attention);
  m.impl("native_dropout", &native_dropout);
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", &attention); }

}  // namespace
}  // namespace pretend_gpu
