#include "launch.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/result_type.h>
#include <c10/core/DeviceGuard.h>

#include <optional>
#include <set>
#include <utility>

#include "allocator.h"
#include "foresight.h"
#include "settings.h"
#include "streams.h"

namespace pretend_gpu {
namespace {

/// Of the first tensor that has one, or of an argument that says it, or the current one.
c10::Device device_of_call(const Stack& stack, std::size_t first) {
  c10::Device said = device_of(current_device());
  for (std::size_t i = first; i < stack.size(); ++i) {
    for (const at::Tensor& each : tensors_of(stack[i])) {
      if (each.defined() && each.is_cuda()) return each.device();
    }
    if (stack[i].isDevice() && stack[i].toDevice().is_cuda() && stack[i].toDevice().has_index())
      said = stack[i].toDevice();
  }
  return said;
}

at::Tensor argument_at(const Stack& stack, std::size_t first, const Place& place) {
  return tensors_of(stack[first + static_cast<std::size_t>(place.argument)])[static_cast<std::size_t>(place.number)];
}

at::Tensor made_fresh(const Output& output) {
  return at::detail::empty_strided_generic(output.sizes, output.strides, &allocator(), c10::DispatchKeySet(kKey),
                                           output.dtype);
}

at::Tensor view_of(const at::Tensor& base, const Output& output) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                             base.key_set(), c10::scalarTypeToTypeMeta(output.dtype));
  const std::int64_t offset = base.storage_offset() * base.element_size() + output.offset_in_bytes;
  made.unsafeGetTensorImpl()->set_storage_offset(offset / static_cast<std::int64_t>(c10::elementSize(output.dtype)));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(output.sizes, output.strides);
  return made;
}

/// What the CPU kernel returned, into the memory that was foreseen for it.
void deliver(const Traits& traits, const std::vector<std::vector<Operand>>& fresh, const Stack& results) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  for (std::size_t i = 0; i < fresh.size(); ++i) {
    const std::vector<at::Tensor> made = tensors_of(results[i]);
    for (std::size_t k = 0; k < fresh[i].size(); ++k) {
      const Operand& operand = fresh[i][k];
      if (!operand.is_defined || operand.extent == 0) continue;
      TORCH_CHECK(made[k].sizes() == at::IntArrayRef(operand.sizes) && made[k].scalar_type() == operand.dtype,
                  traits.name, " was foreseen with another geometry");
      Aliases().of(operand).copy_(made[k]);
    }
  }
}

/// Without waiting.
void launch_behind(const c10::OperatorHandle& op, Call call, const Foreseen& foreseen, Stack& stack) {
  const Traits& traits = *call.traits;
  const std::size_t count = call.arguments.size(), first = stack.size() - count;
  for (const Resized& each : foreseen.resized) {
    const at::Tensor out = argument_at(stack, first, each.place);
    out.resize_(each.sizes);
    call.operand(each.place) = operand_of(out, Access::write);
  }
  std::vector<c10::IValue> returned;
  std::vector<std::vector<Operand>> fresh;
  for (const Foreseen::Returned& each : foreseen.returned) {
    auto& operands = fresh.emplace_back();
    c10::List<at::Tensor> list;
    for (const Output& output : each.outputs) {
      at::Tensor made;
      if (output.kind == Output::Kind::same) made = argument_at(stack, first, output.place);
      if (output.kind == Output::Kind::view) made = view_of(argument_at(stack, first, output.place), output);
      if (output.kind == Output::Kind::fresh) made = made_fresh(output);
      operands.push_back(output.kind == Output::Kind::fresh ? operand_of(made, Access::write) : Operand());
      list.push_back(made);
    }
    returned.emplace_back(each.is_list ? c10::IValue(list) : c10::IValue(list.get(0)));
  }
  if (foreseen.has_work) {
    launch_on(current_stream(-1), traits.name, [op, call = std::move(call), fresh = std::move(fresh)] {
      use_threads();
      Aliases aliases;
      Stack values;
      push(values, call, [&](const Place&, const Operand& operand) { return aliases.of(operand); });
      call_on_cpu(op, values);
      deliver(*call.traits, fresh, values);
    });
  }
  torch::jit::drop(stack, count);
  for (c10::IValue& each : returned) stack.push_back(std::move(each));
}

/// A CPU tensor that an operator made here, on the device.
at::Tensor carried_up(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, "the pretend GPU holds strided tensors only, not ",
                              tensor.layout(), " ones");
  at::Tensor made = at::detail::empty_strided_generic(tensor.sizes(), tensor.strides(), &allocator(),
                                                      c10::DispatchKeySet(kKey), tensor.scalar_type());
  run_for_free_on(current_stream(-1), [operand = operand_of(made, Access::write), tensor] {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    Aliases().of(operand).copy_(tensor);
  });
  return made;
}

void launch_waiting(const c10::OperatorHandle& op, const Call& call, Stack& stack) {
  const Traits& traits = *call.traits;
  const std::size_t count = call.arguments.size(), first = stack.size() - count;
  launches().synchronized(traits.name);
  announce_wait();
  synchronize(current_stream(-1));
  Aliases aliases;
  Stack values;
  push(values, call, [&](const Place&, const Operand& operand) { return aliases.of(operand); });
  call_on_cpu(op, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto* alias = op.schema().returns()[i].alias_info();
    if (alias != nullptr) {  // in place, or out=
      for (std::size_t k = 0; k < count; ++k) {
        const auto* its = op.schema().arguments()[k].alias_info();
        if (its == nullptr || !(*its == *alias)) continue;
        const at::Tensor real = stack[first + k].toTensor();
        if (real.sizes() != values[i].toTensor().sizes()) {
          const at::Tensor made = carried_up(values[i].toTensor());
          real.resize_(made.sizes());
          real.copy_(made);
        }
        values[i] = real;
      }
    } else if (values[i].isTensor()) {
      values[i] = carried_up(values[i].toTensor());
    } else if (values[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : values[i].toTensorVector()) list.push_back(carried_up(each));
      values[i] = list;
    }
  }
  torch::jit::drop(stack, count);
  for (c10::IValue& each : values) stack.push_back(std::move(each));
}

/// CUDA counts integers, the CPU floats alone.
bool counts_integers(const Traits& traits, const Stack& stack) {
  return traits.name == "histc" && !at::isFloatingType(torch::jit::peek(stack, 0, 4).toTensor().scalar_type());
}

void count_as_floats(const c10::OperatorHandle& op, Stack& stack) {
  at::Tensor counted = torch::jit::peek(stack, 0, 4).toTensor();
  const at::ScalarType type = counted.scalar_type();
  torch::jit::peek(stack, 0, 4) = counted.to(at::kDouble);
  op.callBoxed(&stack);
  stack.back() = stack.back().toTensor().to(type);
}

/// CUDA multiplies by the inverse of a scalar that lies on the host. The operator that does so, or none.
std::optional<c10::OperatorHandle> with_inverse(const Traits& traits, Stack& stack) {
  static const std::set<std::string> names = {"div.Tensor", "div_.Tensor", "div.out"};
  if (names.count(traits.name) == 0) return std::nullopt;
  const std::size_t first = stack.size() - traits.parameters.size();
  const at::Tensor divided = stack[first].toTensor(), divisor = stack[first + 1].toTensor();
  c10::ScalarType type = at::result_type(divided, divisor);
  if (at::isIntegralType(type, /*includeBool=*/true)) type = at::get_default_dtype_as_scalartype();
  if (!divided.is_cuda() || !divisor.is_cpu() || divisor.dim() > 0 || at::isComplexType(type)) return std::nullopt;
  const double number = divisor.item<double>();
  const at::Tensor inverse = at::detail::empty_cpu({}, at::kDouble);
  *inverse.mutable_data_ptr<double>() = type == at::kDouble ? 1.0 / number : 1.0f / static_cast<float>(number);
  inverse.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (at::result_type(divided, inverse) != type) return std::nullopt;  // the divisor's type counts, a number's does not
  stack[first + 1] = inverse;
  return c10::Dispatcher::singleton().findSchemaOrThrow(traits.plain_name == "div_" ? "aten::mul_" : "aten::mul",
                                                        traits.name.substr(traits.name.find('.') + 1).c_str());
}

}  // namespace

void launch(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const Traits& traits = traits_of(op);
  if (const auto product = with_inverse(traits, *stack)) {
    product->callBoxed(stack);
    return;
  }
  if (counts_integers(traits, *stack)) {
    count_as_floats(op, *stack);
    return;
  }
  if (traits.is_foreach && !takes_fast_route(op, *stack)) {
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
    return;
  }
  const c10::DeviceGuard guard(device_of_call(*stack, stack->size() - traits.parameters.size()));
  Call call = take(op, *stack, current_device());
  // How many elements a mask selects is in its values; what is written through one is as large as before.
  const bool needs_values = traits.needs_values || (traits.plain_name == "index" && call.has_masks());
  if (!needs_values) {
    const std::shared_ptr<const Foreseen> foreseen = foresee(op, call);
    if (foreseen->is_known) {
      launch_behind(op, std::move(call), *foreseen, *stack);
      return;
    }
  }
  launch_waiting(op, call, *stack);
}

}  // namespace pretend_gpu
