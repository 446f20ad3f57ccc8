#include "bindings/listening.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/errors.h"
#include "base/mutex.h"
#include "bindings/python_errors.h"

namespace noria {
namespace {

using torch::jit::Stack;

// Note [Keys]. torch keeps DeferredInit for other libraries; no library that is still maintained uses it. It comes
// before autograd and autocast, so noria sees operators as they were called. The other key has a fall-through as its
// fallback, which costs an operator nothing, and a kernel for each operator that writes. torch keeps it for tests of a
// single process. Of all free keys, it is the only one for which no alias key registers a torch kernel.
// (CustomRNGKeyId, for example, counts as a backend: it gets composite kernels, which give other bits.) Both keys are
// in every torch from 2.11 on, in the same order. If another library has taken one, importing noria raises.
constexpr c10::DispatchKey kAll = c10::DispatchKey::DeferredInit;
constexpr c10::DispatchKey kWrites = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

struct Entry {
  std::weak_ptr<Listener> listener;
  int number = 0;
};

struct Registry {
  Mutex mutex;
  std::unordered_map<const c10::StorageImpl*, Entry>
      entries NORIA_GUARDED_BY(mutex);  // the listener keeps the storage alive
};

Registry& registry() {
  static auto* const the = new Registry;  // operators may run while static objects are destroyed
  return *the;
}

/// Describes an argument of an operator that has a listener.
struct Heard {
  std::shared_ptr<Listener> listener;
  int number = 0;
};

Heard heard(const c10::Storage& storage) {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  const auto found = all.entries.find(storage.unsafeGetStorageImpl());
  if (found == all.entries.end()) return {};
  return {found->second.listener.lock(), found->second.number};
}

Heard heard(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return {};
  if (!tensor.key_set().has(kAll) && !tensor.key_set().has(kWrites)) return {};
  return heard(tensor.unsafeGetTensorImpl()->unsafe_storage());
}

/// A tensor that counts a request for its storage as a read, because noria hears no read through the storage.
class Listened final : public c10::TensorImpl {
 public:
  using TensorImpl::TensorImpl;

  const c10::Storage& storage() const override {
    as_python_errors([&] {
      if (const Heard found = heard(storage_); found.listener) found.listener->before_read(found.number);
    });
    return TensorImpl::storage();
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allows_change) const override {
    return copied(version, allows_change);
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allows_change) const override {
    return copied(std::move(version), allows_change);
  }

 private:
  template <class Version>
  c10::intrusive_ptr<TensorImpl> copied(Version&& version, bool allows_change) const {
    auto copy = c10::make_intrusive<Listened>(c10::Storage(storage_), key_set(), dtype());
    copy_tensor_metadata(this, copy.get(), std::forward<Version>(version), allows_change);
    return copy;
  }
};

Heard heard_whole(const at::Tensor& tensor) {
  Heard found = heard(tensor);
  if (found.listener && !found.listener->is_whole(found.number, tensor)) found.listener = nullptr;
  return found;
}

/// Calls `act` with every tensor in an argument.
template <class Act>
void for_each_tensor(const c10::IValue& value, const Act& act) {
  if (value.isTensor()) {
    act(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) act(each);
  } else if (value.isList()) {  // of optional tensors
    for (const c10::IValue& each : value.toListRef()) {
      if (each.isTensor()) act(each.toTensor());
    }
  }
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// Tells the listeners of all arguments. Returns the arguments that the operator writes.
std::vector<Heard> tell_listeners(const c10::OperatorHandle& op, const Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const std::size_t first = stack.size() - arguments.size();
  std::vector<Heard> written;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    for_each_tensor(stack[first + i], [&](const at::Tensor& tensor) {
      Heard found = heard(tensor);
      if (!found.listener) return;
      if (!is_written(arguments[i])) {
        found.listener->before_read(found.number);
        return;
      }
      found.listener->before_write(found.number);
      written.push_back(std::move(found));
    });
  }
  return written;
}

/// Runs the operator, then tells the listeners of the tensors that it has written.
void carry_out(const c10::OperatorHandle& op, Stack& stack, c10::DispatchKey without, std::vector<Heard> written) {
  struct End {
    std::vector<Heard> written;
    ~End() {
      for (const Heard& each : written) each.listener->after_write(each.number);
    }
  };
  const End end{std::move(written)};
  const c10::impl::ExcludeDispatchKeyGuard guard(without);
  op.callBoxed(&stack);
}

// ---- operators that a listener may answer -------------------------------------------------------------------------

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

/// Returns the scale that a product with `factor` is for `scaled`, if noria knows its rounding: one product in fp32,
/// rounded to the dtype.
std::optional<Scale> scale_by(const at::Tensor& factor, const at::Tensor& scaled) {
  if (!factor.defined() || factor.numel() != 1 || factor.dim() != 0 || records(factor)) return std::nullopt;
  const at::ScalarType type = scaled.scalar_type();
  if (type != at::kFloat && type != at::kBFloat16 && type != at::kHalf) return std::nullopt;
  if (factor.unsafeGetTensorImpl()->is_wrapped_number() && factor.is_cpu()) {
    if (factor.is_complex()) return std::nullopt;
    return Scale{Scale::By::number, {}, factor.item().toDouble()};
  }
  if (factor.scalar_type() != type || factor.device() != scaled.device() || heard(factor).listener) return std::nullopt;
  return Scale{Scale::By::tensor, factor, 1};
}

/// Returns nothing for 16-bit tensors: on some devices the operators that take a number round it first.
std::optional<Scale> scale_by(const c10::Scalar& factor, const at::Tensor& scaled) {
  if (factor.isComplex() || scaled.scalar_type() != at::kFloat) return std::nullopt;
  return Scale{Scale::By::number, {}, factor.toDouble()};
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
  const c10::impl::ExcludeDispatchKeyGuard without(kAll);
  op.callBoxed(&stack);
  return true;
}

using Answer = bool (*)(const c10::OperatorHandle&, Stack&);

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

// ---- what the dispatcher calls ------------------------------------------------------------------------------------

void hear(const c10::OperatorHandle& op, Stack* stack) {
  bool is_answered = false;
  std::vector<Heard> written;
  as_python_errors([&] {
    const Answer answer = answer_of(op);
    is_answered = answer != nullptr && answer(op, *stack);
    if (!is_answered) written = tell_listeners(op, *stack);
  });
  if (!is_answered) carry_out(op, *stack, kAll, std::move(written));
}

void hear_write(const c10::OperatorHandle& op, Stack* stack) {
  std::vector<Heard> written;
  as_python_errors([&] { written = tell_listeners(op, *stack); });
  carry_out(op, *stack, kWrites, std::move(written));
}

bool writes(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), is_written);
}

torch::Library* library(const char* of, c10::DispatchKey key) {  // never deleted: the tensors may outlive anything
  return new torch::Library(torch::Library::IMPL, of, key, __FILE__, __LINE__);
}

[[noreturn]] void refuse_taken(c10::DispatchKey key, const std::string& taken_for) {
  throw UsageError(std::string("torch's dispatch key ") + c10::toString(key) +
                       " free for noria, which hears by it when a gradient or a weight is written",
                   "another library in this process that has registered itself under it, for " + taken_for,
                   "use noria in a process that does not import that library (of those known, torchdistX takes "
                   "DeferredInit)");
}

/// Returns the names in "aten" of torch's operators that write. Raises UsageError if another library has taken one of
/// the keys. If a library registers a fallback for a key later, torch refuses that.
std::vector<std::string> writing_operators() {
  const std::string of_torch = "aten::";
  std::vector<std::string> found;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::DispatchKey key : {kAll, kWrites}) {
    if (dispatcher.hasBackendFallbackForDispatchKey(key)) refuse_taken(key, "all operators");
  }
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    for (const c10::DispatchKey key : {kAll, kWrites}) {
      if (op->hasKernelForDispatchKey(key)) refuse_taken(key, c10::toString(name));
    }
    if (!name.name.starts_with(of_torch) || !writes(op->schema())) continue;
    const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    found.push_back(name.name.substr(of_torch.size()) + overload);
  }
  return found;
}

}  // namespace

Scale kept(const Scale& scale) {
  if (scale.by == Scale::By::number) return scale;
  const at::NoGradGuard no_grad;
  return {scale.by, scale.tensor.detach().clone(), 1};
}

void multiply_by(const at::Tensor& target, const Scale& scale) {
  const at::NoGradGuard no_grad;
  switch (scale.by) {
  case Scale::By::tensor:
    target.mul_(scale.tensor);
    break;
  case Scale::By::number:
    target.mul_(at::native::wrapped_scalar_tensor(scale.number));  // as Python does: a number would be rounded first
    break;
  case Scale::By::unscaling: {
    at::Tensor ignored = at::zeros({}, scale.tensor.options());
    at::_amp_foreach_non_finite_check_and_unscale_(std::vector<at::Tensor>{target}, ignored, scale.tensor);
    break;
  }
  }
}

void register_listening() {
  const std::vector<std::string> writing = writing_operators();  // before anything is registered
  library("_", kAll)->fallback(torch::CppFunction::makeFromBoxedFunction<&hear>());
  library("_", kWrites)->fallback(torch::CppFunction::makeFallthrough());
  torch::Library* const of_torch = library("aten", kWrites);
  for (const std::string& name : writing) {
    of_torch->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&hear_write>());
  }
}

at::Tensor listened_tensor_in(const c10::Storage& storage, c10::Device device, at::ScalarType dtype,
                              at::IntArrayRef sizes, at::IntArrayRef strides) {
  const at::NoGradGuard no_grad;
  const c10::DispatchKey own = c10::computeDispatchKey(dtype, c10::kStrided, device);
  at::Tensor made = at::detail::make_tensor<Listened>(c10::Storage(storage), c10::DispatchKeySet({own, kAll}),
                                                      c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

c10::DispatchKeySet written_keys() { return c10::DispatchKeySet(kWrites); }

void listen(const c10::Storage& storage, const std::shared_ptr<Listener>& listener, int number) {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  all.entries.insert_or_assign(storage.unsafeGetStorageImpl(), Entry{listener, number});
}

void stop_listening(const c10::Storage& storage) {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  all.entries.erase(storage.unsafeGetStorageImpl());
}

}  // namespace noria
