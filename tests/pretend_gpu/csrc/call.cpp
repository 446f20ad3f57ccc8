#include "call.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

#include "generator.h"
#include "settings.h"
#include "streams.h"

namespace pretend_gpu {
namespace {

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

/// Beside those that work element by element, which take a scalar from the CPU as they take a number.
bool takes_host_scalars(const std::string& name) {
  static const std::set<std::string> names = {"fill_.Tensor", "masked_fill_.Tensor", "masked_fill.Tensor"};
  return names.count(name) > 0 || starts_with(name, "_foreach_") || starts_with(name, "_fused_") ||
         starts_with(name, "index_fill") || starts_with(name, "_index_put_impl_");
}

bool only_writes(const std::string& name) {
  static const std::set<std::string> names = {"fill_",      "zero_",   "copy_",          "normal_",       "uniform_",
                                              "random_",    "set_",    "bernoulli_",     "exponential_",  "log_normal_",
                                              "geometric_", "cauchy_", "_foreach_zero_", "_foreach_copy_"};
  return names.count(name) > 0;
}

Traits made_for(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  Traits traits;
  const std::string& name = schema.name();
  const std::size_t colons = name.rfind("::");
  traits.plain_name = colons == std::string::npos ? name : name.substr(colons + 2);
  traits.name = schema.overload_name().empty() ? traits.plain_name : traits.plain_name + "." + schema.overload_name();
  traits.is_foreach = starts_with(traits.plain_name, "_foreach_");
  traits.is_multi_tensor = traits.is_foreach || starts_with(traits.plain_name, "_amp_foreach_") ||
                           (starts_with(traits.plain_name, "_fused_") && traits.plain_name.back() == '_');
  traits.takes_indices = traits.plain_name == "index" || traits.plain_name == "_unsafe_index" ||
                         traits.plain_name == "_index_put_impl_" || traits.plain_name == "index_put";
  traits.is_pointwise = op.hasTag(at::Tag::pointwise);
  traits.takes_host_scalars = traits.is_pointwise ? traits.plain_name != "equal" : takes_host_scalars(traits.name);
  traits.only_writes = only_writes(traits.plain_name);
  traits.needs_values =
      op.hasTag(at::Tag::data_dependent_output) || (op.hasTag(at::Tag::dynamic_output_shape) && !traits.takes_indices);
  for (const c10::Argument& returned : schema.returns()) {
    traits.needs_values |= returned.type()->repr_str().find("Tensor") == std::string::npos;
  }
  bool has_generator = false;
  for (const c10::Argument& declared : schema.arguments()) {
    Traits::Parameter& parameter = traits.parameters.emplace_back();
    parameter.name = declared.name();
    parameter.is_written = declared.alias_info() != nullptr && declared.alias_info()->isWrite();
    parameter.is_generator = declared.type()->repr_str().find("Generator") != std::string::npos;
    parameter.is_out = parameter.is_written && declared.kwarg_only();
    has_generator |= parameter.is_generator;
  }
  // Attention is tagged so because of its dropout, which the CPU's kernels refuse.
  traits.draws_by_itself = op.hasTag(at::Tag::nondeterministic_seeded) && !has_generator &&
                           traits.plain_name.find("sdp") == std::string::npos &&
                           !starts_with(traits.plain_name, "_scaled_dot_product");
  return traits;
}

[[noreturn]] void raise_elsewhere(const Traits& traits, const std::string& argument, c10::Device its, int device) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but got ", argument, " is on ", its,
              ", different from other tensors on ", device_of(device),
              " (when checking argument in method wrapper_CUDA_", traits.plain_name, ")");
}

/// CUDA passes a scalar of the CPU by value, and fetches indices itself.
void check_device(const Traits& traits, const Traits::Parameter& parameter, const at::Tensor& tensor, bool is_index,
                  int device) {
  if (!tensor.defined() || tensor.device() == device_of(device)) return;
  const bool may_be_on_host = tensor.is_cpu() && !parameter.is_written &&
                              ((tensor.dim() == 0 && traits.takes_host_scalars) || (traits.takes_indices && is_index) ||
                               tensor.unsafeGetTensorImpl()->is_wrapped_number());
  if (!may_be_on_host) raise_elsewhere(traits, parameter.name, tensor.device(), device);
}

}  // namespace

const Traits& traits_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* const known = new std::unordered_map<const void*, std::unique_ptr<const Traits>>;
  const std::lock_guard lock(mutex);
  auto& traits = (*known)[&op.schema()];
  if (!traits) traits = std::make_unique<const Traits>(made_for(op));
  return *traits;
}

std::optional<at::Generator> Call::generator() const {
  return seed ? std::optional<at::Generator>(at::detail::createCPUGenerator(*seed)) : std::nullopt;
}

bool Call::has_masks() const {
  for (const Argument& argument : arguments) {
    if (argument.kind != Argument::Kind::optional_tensors) continue;
    for (const Operand& each : argument.operands) {
      if (each.is_defined && (each.dtype == at::kBool || each.dtype == at::kByte)) return true;
    }
  }
  return false;
}

Call take(const c10::OperatorHandle& op, const Stack& stack, int device) {
  Call call;
  const Traits& traits = traits_of(op);
  call.traits = &traits;
  const std::size_t count = traits.parameters.size(), first = stack.size() - count;
  std::optional<at::Generator> given;
  bool has_generator = false;
  std::int64_t link_read = 0, link_written = 0;
  const auto add = [&](Argument& argument, const Traits::Parameter& parameter, const at::Tensor& tensor) {
    check_device(traits, parameter, tensor, argument.kind == Argument::Kind::optional_tensors, device);
    const Access access = !parameter.is_written    ? Access::read
                          : traits.is_multi_tensor ? Access::write_as_const
                                                   : Access::write;
    Operand& operand = argument.operands.emplace_back(operand_of(tensor, access));
    if (!operand.is_defined || operand.is_on_host() || !check_reachable(operand, device, traits.name)) return;
    const std::int64_t bytes = tensor.numel() * tensor.element_size();
    if (parameter.is_written) link_written += bytes;
    if (!parameter.is_written || !(parameter.is_out || traits.only_writes)) link_read += bytes;
  };
  for (std::size_t i = 0; i < count; ++i) {
    const c10::IValue& value = stack[first + i];
    const Traits::Parameter& parameter = traits.parameters[i];
    Argument& argument = call.arguments.emplace_back();
    if (parameter.is_generator) {
      argument.kind = Argument::Kind::generator;
      has_generator = true;
      if (value.isGenerator()) given = value.toGenerator();
    } else if (value.isTensor()) {
      argument.kind = Argument::Kind::tensor;
      add(argument, parameter, value.toTensor());
    } else if (value.isTensorList()) {
      argument.kind = Argument::Kind::tensors;
      for (const at::Tensor& each : value.toTensorVector()) add(argument, parameter, each);
    } else if (value.isOptionalTensorList()) {
      argument.kind = Argument::Kind::optional_tensors;
      for (const at::Tensor& each : tensors_of(value)) add(argument, parameter, each);
    } else if (value.isDevice()) {
      argument.kind = Argument::Kind::device;
    } else {
      argument.other = value;
    }
  }
  TORCH_CHECK(!traits.draws_by_itself || has_generator, "the pretend GPU has no random numbers for ", traits.name);
  if (has_generator) call.seed = take_seed(given, device);
  if (link_read > 0 || link_written > 0) launches().crossed_link(link_read, link_written);
  return call;
}

void call_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  op.callBoxed(&stack);
}

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  std::vector<at::Tensor> tensors;
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    tensors = value.toTensorVector();
  } else if (value.isOptionalTensorList()) {
    for (const c10::IValue& each : value.toListRef()) {
      tensors.push_back(each.isTensor() ? each.toTensor() : at::Tensor());
    }
  }
  return tensors;
}

}  // namespace pretend_gpu
