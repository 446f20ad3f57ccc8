// Which lists of tensors CUDA takes in one launch: the conditions of torch's own code (ATen/native/ForeachUtils.h). It
// matters beyond speed: the one launch writes through const pointers, so that storages' write call-backs do not fire.
#include <ATen/native/ForeachUtils.h>

#include <set>

#include "launch.h"

namespace pretend_gpu {
namespace {

/// Where integers become floats, CUDA goes tensor by tensor.
bool makes_floats(const std::string& name) {
  static const std::set<std::string> names = {
      "_foreach_div",    "_foreach_sqrt",    "_foreach_exp",        "_foreach_tan",   "_foreach_sin",  "_foreach_cos",
      "_foreach_tanh",   "_foreach_sinh",    "_foreach_cosh",       "_foreach_log",   "_foreach_log2", "_foreach_log10",
      "_foreach_log1p",  "_foreach_expm1",   "_foreach_reciprocal", "_foreach_rsqrt", "_foreach_erf",  "_foreach_erfc",
      "_foreach_lgamma", "_foreach_sigmoid", "_foreach_asin",       "_foreach_acos",  "_foreach_atan", "_foreach_norm"};
  std::string functional = name;
  if (functional.back() == '_') functional.pop_back();
  return names.count(functional) > 0;
}

}  // namespace

bool takes_fast_route(const c10::OperatorHandle& op, const Stack& stack) {
  const Traits& traits = traits_of(op);
  std::vector<std::vector<at::Tensor>> lists;
  std::vector<c10::Scalar> scalars;
  for (std::size_t i = stack.size() - traits.parameters.size(); i < stack.size(); ++i) {
    const c10::IValue& value = stack[i];
    if (value.isTensorList()) lists.push_back(value.toTensorVector());
    else if (value.isScalar()) scalars.push_back(value.toScalar());
    else if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isScalar()) {
      for (const c10::IValue& each : value.toListRef()) scalars.push_back(each.toScalar());
    } else if (value.isTensor() && !lists.empty() && !lists[0].empty() &&
               value.toTensor().scalar_type() != lists[0][0].scalar_type() && value.toTensor().is_cuda()) {
      return false;
    }
  }
  if (lists.empty() || lists[0].empty()) return false;
  for (const auto& list : lists) {
    if (list.size() != lists[0].size()) return false;  // the slow route says what is wrong
  }
  if (scalars.size() != 1 && scalars.size() != lists[0].size()) scalars.clear();
  // A norm's order says nothing about types.
  if (traits.plain_name == "_foreach_norm" || traits.plain_name == "_foreach_copy_") scalars.clear();
  const std::vector<at::TensorList> refs(lists.begin(), lists.end());
  return at::native::check_fast_path_restrictions(refs, scalars, makes_floats(traits.plain_name),
                                                  traits.plain_name == "_foreach_copy_");
}

}  // namespace pretend_gpu
