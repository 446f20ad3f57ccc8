#include "bindings/listening.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/errors.h"
#include "base/mutex.h"
#include "bindings/listened_answers.h"
#include "bindings/python_errors.h"

namespace noria {
namespace {

using torch::jit::Stack;

// Note [Keys]. kHearsAll is DeferredInit, which torch keeps for other libraries; no library that is still maintained
// uses it. It comes before autograd and autocast, so noria sees operators as they were called. kWrites has a
// fall-through as its fallback, which costs an operator nothing, and a kernel for each operator that writes. torch
// keeps it for tests. Of all free keys, it is the only one for which no alias key registers a torch kernel.
// (CustomRNGKeyId, for example, counts as a backend: it gets composite kernels, which give other bits.) Both keys are
// in every torch from 2.11 on, in the same order. If another library has taken one, importing noria raises.
constexpr c10::DispatchKey kWrites = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

struct Entry {
  std::weak_ptr<Listener> listener;
  int number = 0;
};

struct Registry {
  Mutex mutex;
  std::unordered_map<const c10::StorageImpl*, Entry>
      entries NORIA_GUARDED_BY(mutex);  // the listener's owner keeps the storage alive
};

Registry& registry() {
  static auto* const the = new Registry;  // operators may run while static objects are destroyed
  return *the;
}

Heard found_in(const c10::Storage& storage) {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  const auto found = all.entries.find(storage.unsafeGetStorageImpl());
  if (found == all.entries.end()) return {};
  return {found->second.listener.lock(), found->second.number};
}

}  // namespace

Heard heard(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return {};
  if (!tensor.key_set().has(kHearsAll) && !tensor.key_set().has(kWrites)) return {};
  return found_in(tensor.unsafeGetTensorImpl()->unsafe_storage());
}

namespace {

/// Counts a request for its storage as a read, because noria hears no read through the storage.
class Listened final : public c10::TensorImpl {
 public:
  using TensorImpl::TensorImpl;

  const c10::Storage& storage() const override {
    as_python_errors([&] {
      if (const Heard found = found_in(storage_); found.listener) found.listener->before_read(found.number);
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

struct Used {
  std::vector<Heard> read, written;
};

/// Tells the listeners of all arguments, and returns them.
Used tell_listeners(const c10::OperatorHandle& op, const Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const std::size_t first = stack.size() - arguments.size();
  Used used;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    for_each_tensor(stack[first + i], [&](const at::Tensor& tensor) {
      Heard found = heard(tensor);
      if (!found.listener) return;
      if (!is_written(arguments[i])) {
        found.listener->before_read(found.number);
        used.read.push_back(std::move(found));
        return;
      }
      found.listener->before_write(found.number);
      used.written.push_back(std::move(found));
    });
  }
  return used;
}

/// Runs the operator, then tells the listeners of the tensors that it has written. If it raises, tells all listeners.
void carry_out(const c10::OperatorHandle& op, Stack& stack, c10::DispatchKey without, const Used& used) {
  struct End {
    const Used& used;
    ~End() {
      for (const Heard& each : used.written) each.listener->after_write(each.number);
    }
  };
  const End end{used};
  const c10::impl::ExcludeDispatchKeyGuard guard(without);
  try {
    op.callBoxed(&stack);
  } catch (...) {
    as_python_errors([&] {
      for (const auto* each : {&used.written, &used.read}) {
        for (const Heard& told : *each) told.listener->failed(told.number);
      }
    });
    throw;
  }
}

// ---- what the dispatcher calls ------------------------------------------------------------------------------------

void hear(const c10::OperatorHandle& op, Stack* stack) {
  bool is_answered = false;
  Used used;
  as_python_errors([&] {
    const Answer answer = answer_of(op);
    is_answered = answer != nullptr && answer(op, *stack);
    if (!is_answered) used = tell_listeners(op, *stack);
  });
  if (!is_answered) carry_out(op, *stack, kHearsAll, used);
}

void hear_write(const c10::OperatorHandle& op, Stack* stack) {
  Used used;
  as_python_errors([&] { used = tell_listeners(op, *stack); });
  carry_out(op, *stack, kWrites, used);
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
  for (const c10::DispatchKey key : {kHearsAll, kWrites}) {
    if (dispatcher.hasBackendFallbackForDispatchKey(key)) refuse_taken(key, "all operators");
  }
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    for (const c10::DispatchKey key : {kHearsAll, kWrites}) {
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
  library("_", kHearsAll)->fallback(torch::CppFunction::makeFromBoxedFunction<&hear>());
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
  at::Tensor made = at::detail::make_tensor<Listened>(c10::Storage(storage), c10::DispatchKeySet({own, kHearsAll}),
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
