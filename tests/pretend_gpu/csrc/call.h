// A call of an operator, taken apart: its tensors as operands, all else as it is.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "operand.h"

namespace pretend_gpu {

using torch::jit::Stack;

/// What an operator's name, schema and tags say, once for all calls.
struct Traits {
  std::string name;                 // with its overload, without "aten::"
  std::string plain_name;           // without both
  bool is_foreach = false;          // a list of tensors is one launch, if CUDA's fast route takes it
  bool is_multi_tensor = false;     // writes through const pointers: `_foreach_`, `_fused_`, the scaler's unscale
  bool needs_values = false;        // its result, or the size of it, depends on what the tensors hold
  bool takes_indices = false;       // index and its kin: boolean masks need values, and indices may lie on the CPU
  bool takes_host_scalars = false;  // a tensor of no dimension may lie on the CPU
  bool is_pointwise = false;
  bool only_writes = false;      // what it writes it does not read
  bool draws_by_itself = false;  // random numbers, from no generator that could be given
  struct Parameter {
    std::string name;
    bool is_written = false, is_generator = false, is_out = false;
  };
  std::vector<Parameter> parameters;
};
const Traits& traits_of(const c10::OperatorHandle& op);

/// Which tensor of the arguments.
struct Place {
  int argument, number;
};

/// An argument with its tensors taken out.
struct Argument {
  enum class Kind { tensor, tensors, optional_tensors, generator, device, other } kind = Kind::other;
  std::vector<Operand> operands;
  c10::IValue other;
};

struct Call {
  const Traits* traits = nullptr;
  std::vector<Argument> arguments;
  std::optional<std::uint64_t> seed;  // of its random numbers

  /// A generator for the CPU kernel, or none if the operator draws nothing.
  std::optional<at::Generator> generator() const;
  /// Boolean masks among its indices.
  bool has_masks() const;
  Operand& operand(const Place& place) {
    return arguments[static_cast<std::size_t>(place.argument)].operands[static_cast<std::size_t>(place.number)];
  }
};

/// The arguments of the top of the stack. The device must be current. Raises if they are not all on it.
Call take(const c10::OperatorHandle& op, const Stack& stack, int device);

/// The same arguments with tensors that `make(place, operand)` makes, pushed onto a stack for the CPU kernel.
template <class Make>
void push(Stack& stack, const Call& call, const Make& make) {
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    const Argument& argument = call.arguments[i];
    const auto made = [&](std::size_t k) {
      return make(Place{static_cast<int>(i), static_cast<int>(k)}, argument.operands[k]);
    };
    switch (argument.kind) {
    case Argument::Kind::tensor:
      stack.emplace_back(made(0));
      break;
    case Argument::Kind::tensors: {
      c10::List<at::Tensor> list;
      for (std::size_t k = 0; k < argument.operands.size(); ++k) list.push_back(made(k));
      stack.emplace_back(std::move(list));
      break;
    }
    case Argument::Kind::optional_tensors: {
      c10::List<std::optional<at::Tensor>> list;
      for (std::size_t k = 0; k < argument.operands.size(); ++k) {
        list.push_back(argument.operands[k].is_defined ? std::optional<at::Tensor>(made(k)) : std::nullopt);
      }
      stack.emplace_back(std::move(list));
      break;
    }
    case Argument::Kind::generator: {
      const std::optional<at::Generator> generator = call.generator();
      stack.emplace_back(generator ? c10::IValue(*generator) : c10::IValue());
      break;
    }
    case Argument::Kind::device:
      stack.emplace_back(c10::Device(c10::kCPU));
      break;
    case Argument::Kind::other:
      stack.push_back(argument.other);
      break;
    }
  }
}

/// On this thread, by the CPU kernel, out of reach of the caller's autograd and autocast.
void call_on_cpu(const c10::OperatorHandle& op, Stack& stack);

/// The tensors of an argument on the stack, undefined ones too.
std::vector<at::Tensor> tensors_of(const c10::IValue& value);

}  // namespace pretend_gpu
