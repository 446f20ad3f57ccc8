#include "bindings/listened_answers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace noria {
namespace {

using torch::jit::Stack;

Heard heard_whole(const at::Tensor& tensor) {
  Heard found = heard(tensor);
  if (found.listener && !found.listener->is_whole(found.number, tensor)) found.listener = nullptr;
  return found;
}

bool records(const at::Tensor& tensor) { return at::GradMode::is_enabled() && tensor.requires_grad(); }

/// Takes the operator's arguments off the stack and returns them, from first to last.
std::vector<c10::IValue> taken(const c10::OperatorHandle& op, Stack& stack) {
  return torch::jit::pop(stack, op.schema().arguments().size());
}

/// Returns the tensors of a list that are whole and listened to, by listener, as indices in the list.
std::vector<std::pair<std::shared_ptr<Listener>, std::vector<std::size_t>>>
by_listener(const std::vector<at::Tensor>& tensors, std::vector<int>& numbers) {
  std::vector<std::pair<std::shared_ptr<Listener>, std::vector<std::size_t>>> groups;
  numbers.assign(tensors.size(), -1);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (records(tensors[i])) continue;
    const Heard found = heard_whole(tensors[i]);
    if (!found.listener) continue;
    numbers[i] = found.number;
    const auto known =
        std::find_if(groups.begin(), groups.end(), [&](const auto& group) { return group.first == found.listener; });
    if (known != groups.end()) known->second.push_back(i);
    else groups.push_back({found.listener, {i}});
  }
  return groups;
}

std::vector<int> numbers_of(const std::vector<std::size_t>& members, const std::vector<int>& numbers) {
  std::vector<int> chosen;
  for (std::size_t i : members) chosen.push_back(numbers[i]);
  return chosen;
}

/// Returns norms by index in `tensors`; undefined if not known.
std::vector<at::Tensor> known_norms(const std::vector<at::Tensor>& tensors, const NormAsked& asked) {
  std::vector<at::Tensor> norms(tensors.size());
  std::vector<int> numbers;
  for (const auto& [listener, members] : by_listener(tensors, numbers)) {
    std::vector<at::Tensor> known = listener->norms(numbers_of(members, numbers), asked);
    for (std::size_t i = 0; i < members.size(); ++i) norms[members[i]] = std::move(known[i]);
  }
  return norms;
}

/// _foreach_norm(Tensor[] self, Scalar ord=2, ScalarType? dtype=None) -> Tensor[]
bool answer_list_norm(const c10::OperatorHandle& op, Stack& stack) {
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  const std::vector<at::Tensor> tensors = arguments[0].toTensorVector();
  const NormAsked asked{true, arguments[1].toScalar().toDouble(), arguments[2].toOptional<at::ScalarType>()};
  std::vector<at::Tensor> norms = known_norms(tensors, asked);
  std::vector<at::Tensor> rest;
  std::vector<std::size_t> unknown;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (norms[i].defined()) continue;
    unknown.push_back(i);
    rest.push_back(tensors[i]);
  }
  if (unknown.size() == tensors.size()) return false;
  if (!rest.empty()) {
    std::vector<at::Tensor> taken_now = at::_foreach_norm(rest, arguments[1].toScalar(), asked.dtype);
    for (std::size_t i = 0; i < unknown.size(); ++i) norms[unknown[i]] = std::move(taken_now[i]);
  }
  taken(op, stack);
  stack.emplace_back(std::move(norms));
  return true;
}

/// linalg_vector_norm(Tensor self, Scalar ord=2, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None)
bool answer_norm(const c10::OperatorHandle& op, Stack& stack) {
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  const bool is_of_all = arguments[2].isNone() || arguments[2].toIntVector().empty();
  if (!is_of_all || arguments[3].toBool()) return false;
  const NormAsked asked{false, arguments[1].toScalar().toDouble(), arguments[4].toOptional<at::ScalarType>()};
  at::Tensor norm = known_norms({arguments[0].toTensor()}, asked).front();
  if (!norm.defined()) return false;
  taken(op, stack);
  stack.emplace_back(std::move(norm));
  return true;
}

/// Returns nothing for a number that fp32 lacks: some operators raise then on some devices.
std::optional<Scale> scale_by(double factor) {
  if (c10::overflows<float, double>(factor)) return std::nullopt;
  return Scale{Scale::By::number, {}, factor};
}

/// Returns the scale that a product with `factor` is for `scaled`, if noria knows its rounding: one product in fp32,
/// rounded to the dtype.
std::optional<Scale> scale_by(const at::Tensor& factor, const at::Tensor& scaled) {
  if (!factor.defined() || factor.numel() != 1 || factor.dim() != 0 || records(factor)) return std::nullopt;
  const at::ScalarType type = scaled.scalar_type();
  if (type != at::kFloat && type != at::kBFloat16 && type != at::kHalf) return std::nullopt;
  if (factor.unsafeGetTensorImpl()->is_wrapped_number() && factor.is_cpu()) {
    if (factor.is_complex()) return std::nullopt;
    return scale_by(factor.item().toDouble());
  }
  if (factor.scalar_type() != type || factor.device() != scaled.device() || heard(factor).listener) return std::nullopt;
  return Scale{Scale::By::tensor, factor, 1};
}

/// Returns nothing for 16-bit tensors: on some devices the operators that take a number round it first.
std::optional<Scale> scale_by(const c10::Scalar& factor, const at::Tensor& scaled) {
  if (factor.isComplex() || scaled.scalar_type() != at::kFloat) return std::nullopt;
  return scale_by(factor.toDouble());
}

std::optional<Scale> scale_by(const c10::IValue& factor, const at::Tensor& scaled) {
  return factor.isTensor() ? scale_by(factor.toTensor(), scaled) : scale_by(factor.toScalar(), scaled);
}

/// Returns true if the listener notes the product instead of the operator. `copy`: a copy of the factor, made at the
/// first need and shared by all tensors of one call.
bool multiplied(const at::Tensor& tensor, const c10::IValue& factor, std::optional<Scale>& copy) {
  if (records(tensor)) return false;
  const Heard found = heard_whole(tensor);
  if (!found.listener) return false;
  const auto scale = scale_by(factor, tensor);
  if (!scale || !found.listener->may_multiply(found.number)) return false;
  if (!copy) copy = kept(*scale);
  found.listener->multiply(found.number, *copy);
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  return true;
}

/// mul_(Tensor(a!) self, Tensor or Scalar other) -> Tensor(a!)
bool answer_multiply(const c10::OperatorHandle& op, Stack& stack) {
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  const at::Tensor tensor = arguments[0].toTensor();
  std::optional<Scale> copy;
  if (!multiplied(tensor, arguments[1], copy)) return false;
  taken(op, stack);
  stack.emplace_back(tensor);
  return true;
}

/// _foreach_mul_(Tensor(a!)[] self, Tensor or Scalar other) -> ()
bool answer_list_multiply(const c10::OperatorHandle& op, Stack& stack) {
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  const c10::IValue factor = arguments[1];
  std::optional<Scale> copy;
  std::vector<at::Tensor> rest;
  std::size_t count = 0;
  for (const at::Tensor& each : arguments[0].toTensorVector()) {
    ++count;
    if (!multiplied(each, factor, copy)) rest.push_back(each);
  }
  if (rest.size() == count) return false;
  if (!rest.empty()) {
    if (factor.isTensor()) at::_foreach_mul_(rest, factor.toTensor());
    else at::_foreach_mul_(rest, factor.toScalar());
  }
  taken(op, stack);
  return true;
}

/// _amp_foreach_non_finite_check_and_unscale_(Tensor(a!)[] self, Tensor(b!) found_inf, Tensor inv_scale) -> ()
bool answer_unscale(const c10::OperatorHandle& op, Stack& stack) {
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  const std::vector<at::Tensor> tensors = arguments[0].toTensorVector();
  at::Tensor found_inf = arguments[1].toTensor();
  at::Tensor inverse = arguments[2].toTensor();
  if (inverse.numel() != 1 || inverse.scalar_type() != at::kFloat || heard(inverse).listener) return false;
  if (inverse.dim() > 0) inverse = inverse.reshape({});
  std::vector<int> numbers;
  std::vector<bool> is_done(tensors.size(), false);
  for (const auto& [listener, members] : by_listener(tensors, numbers)) {
    if (!listener->unscale(numbers_of(members, numbers), found_inf, {Scale::By::unscaling, inverse, 1})) continue;
    for (std::size_t i : members) {
      is_done[i] = true;
      if (!tensors[i].is_inference()) tensors[i].unsafeGetTensorImpl()->bump_version();
    }
  }
  std::vector<at::Tensor> rest;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!is_done[i]) rest.push_back(tensors[i]);
  }
  if (rest.size() == tensors.size()) return false;
  if (!rest.empty()) at::_amp_foreach_non_finite_check_and_unscale_(rest, found_inf, inverse);
  taken(op, stack);
  return true;
}

/// Runs an operator that makes an alias and reads nothing.
bool answer_alias(const c10::OperatorHandle& op, Stack& stack) {
  const c10::impl::ExcludeDispatchKeyGuard without(kHearsAll);
  op.callBoxed(&stack);
  return true;
}

}  // namespace

Answer answer_of(const c10::OperatorHandle& op) {
  static const auto* const answers = new std::unordered_map<std::string, Answer>{
      {"aten::_foreach_norm.Scalar", &answer_list_norm},
      {"aten::linalg_vector_norm.", &answer_norm},
      {"aten::mul_.Tensor", &answer_multiply},
      {"aten::mul_.Scalar", &answer_multiply},
      {"aten::_foreach_mul_.Tensor", &answer_list_multiply},
      {"aten::_foreach_mul_.Scalar", &answer_list_multiply},
      {"aten::_amp_foreach_non_finite_check_and_unscale_.", &answer_unscale},
      {"aten::detach.", &answer_alias},
      {"aten::alias.", &answer_alias},
  };
  const auto found = answers->find(op.schema().name() + "." + op.schema().overload_name());
  return found == answers->end() ? nullptr : found->second;
}

}  // namespace noria
