#include "foresight.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace pretend_gpu {
namespace {

constexpr std::size_t kMostKept = 50'000;  // then the memory of signatures begins anew

class Key {
 public:
  explicit Key(const Traits& traits) : is_pointwise_(traits.is_pointwise || traits.is_multi_tensor) {
    text_ = traits.name;
    number(at::get_default_dtype_as_scalartype());
  }
  void add(const Argument& argument) {
    number(static_cast<int>(argument.kind));
    number(argument.operands.size());
    for (const Operand& each : argument.operands) add(each);
    if (argument.kind == Argument::Kind::other) add(argument.other);
  }
  std::string take() { return std::move(text_); }

 private:
  template <class Number>
  void number(Number value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  template <class Numbers>
  void numbers(const Numbers& values) {
    number(values.size());
    for (const auto value : values) number(value);
  }
  void add(const Operand& operand) {
    number(operand.is_defined);
    if (!operand.is_defined) return;
    number(operand.dtype);
    number(operand.is_wrapped_number);
    number(operand.is_on_host());
    numbers(operand.sizes);
    numbers(operand.strides);
  }
  void add(const c10::IValue& value) {
    if (value.isInt()) {
      text_ += 'i';
      number(value.toInt());
    } else if (value.isDouble()) {
      text_ += 'd';
      // Learning rates and the like: there would be a new one in each step.
      if (!is_pointwise_) number(value.toDouble());
    } else if (value.isBool()) {
      text_ += value.toBool() ? 't' : 'f';
    } else if (value.isNone()) {
      text_ += 'n';
    } else if (value.isString()) {
      text_ += value.toStringRef() + '\0';
    } else if (value.isIntList()) {
      text_ += 'I';
      numbers(value.toIntVector());
    } else if (value.isDoubleList()) {
      text_ += 'D';
      numbers(value.toDoubleVector());
    } else if (value.isList()) {
      text_ += 'L';
      for (const c10::IValue& each : value.toListRef()) add(each);
    } else {
      text_ += value.tagKind();
    }
  }

  const bool is_pointwise_;
  std::string text_;
};

using Dummies = std::vector<std::vector<at::Tensor>>;  // by argument

template <class Is>
std::optional<Place> find(const Dummies& dummies, const Is& is) {
  for (std::size_t i = 0; i < dummies.size(); ++i) {
    for (std::size_t k = 0; k < dummies[i].size(); ++k) {
      if (dummies[i][k].defined() && is(dummies[i][k])) return Place{static_cast<int>(i), static_cast<int>(k)};
    }
  }
  return std::nullopt;
}

Output output_of(const at::Tensor& tensor, const Dummies& dummies) {
  Output output;
  if (!tensor.defined()) return output;
  output.sizes = tensor.sizes().vec();
  output.strides = tensor.strides().vec();
  output.dtype = tensor.scalar_type();
  output.offset_in_bytes = tensor.storage_offset() * tensor.element_size();
  output.kind = Output::Kind::fresh;
  if (const auto same = find(dummies, [&](const at::Tensor& each) { return each.is_same(tensor); })) {
    output.kind = Output::Kind::same;
    output.place = *same;
  } else if (const auto base = find(dummies, [&](const at::Tensor& each) {
               return each.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl();
             })) {
    output.kind = Output::Kind::view;
    output.place = *base;
  }
  return output;
}

/// False if the kernel refuses such values.
bool run_on_dummies(const c10::OperatorHandle& op, const Call& call, int value, Dummies& dummies, Stack& stack) {
  dummies.clear();
  stack.clear();
  for (const Argument& argument : call.arguments) {
    auto& of_argument = dummies.emplace_back();
    for (const Operand& each : argument.operands) of_argument.push_back(dummy_of(each, value));
  }
  push(stack, call, [&](const Place& place, const Operand&) {
    return dummies[static_cast<std::size_t>(place.argument)][static_cast<std::size_t>(place.number)];
  });
  try {
    call_on_cpu(op, stack);
  } catch (const std::exception&) {
    return false;  // who asked hears it from the real call
  }
  return true;
}

std::shared_ptr<const Foreseen> tried(const c10::OperatorHandle& op, const Call& call) {
  auto foreseen = std::make_shared<Foreseen>();
  Dummies dummies;
  Stack stack;
  if (!run_on_dummies(op, call, 0, dummies, stack) && !run_on_dummies(op, call, 1, dummies, stack)) return foreseen;
  for (std::size_t i = 0; i < call.arguments.size(); ++i) foreseen->has_work |= call.traits->parameters[i].is_written;
  for (const c10::IValue& value : stack) {
    if (!value.isTensor() && !value.isTensorList()) return foreseen;
    auto& returned = foreseen->returned.emplace_back();
    returned.is_list = value.isTensorList();
    for (const at::Tensor& tensor : tensors_of(value)) {
      if (tensor.defined() && tensor.layout() != at::kStrided) return foreseen;
      returned.outputs.push_back(output_of(tensor, dummies));
      foreseen->has_work |= returned.outputs.back().kind == Output::Kind::fresh;
    }
  }
  foreseen->has_work |= stack.empty();
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    if (call.arguments[i].kind != Argument::Kind::tensor || !dummies[i][0].defined()) continue;
    if (dummies[i][0].sizes() != at::IntArrayRef(call.arguments[i].operands[0].sizes)) {
      foreseen->resized.push_back({{static_cast<int>(i), 0}, dummies[i][0].sizes().vec()});
    }
  }
  foreseen->is_known = true;
  return foreseen;
}

}  // namespace

std::shared_ptr<const Foreseen> foresee(const c10::OperatorHandle& op, const Call& call) {
  static std::mutex mutex;
  static auto* const kept = new std::unordered_map<std::string, std::shared_ptr<const Foreseen>>;
  Key signature(*call.traits);
  for (const Argument& each : call.arguments) signature.add(each);
  const std::string key = signature.take();
  {
    const std::lock_guard lock(mutex);
    const auto found = kept->find(key);
    if (found != kept->end()) return found->second;
  }
  std::shared_ptr<const Foreseen> foreseen = tried(op, call);
  const std::lock_guard lock(mutex);
  if (kept->size() >= kMostKept) kept->clear();
  return kept->emplace(key, foreseen).first->second;
}

}  // namespace pretend_gpu
