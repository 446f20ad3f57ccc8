#include "bindings/shown_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <limits>

namespace noria {
namespace {

// Finds non-finite elements: this norm is infinite or NaN if an element is, and never otherwise.
const NormAsked kLargest{true, std::numeric_limits<double>::infinity(), std::nullopt};

// A clip asks for one of these norms. noria takes both as a gradient arrives if the bytes will be gone when the loop
// asks. On CUDA they may differ in their last bit.
const NormAsked kUsual{true, 2, std::nullopt};
const NormAsked kOneByOne{false, 2, std::nullopt};

constexpr std::size_t kMostScales = 2;  // of one update: an unscaling and a clip

at::Tensor norm_of(const at::Tensor& value, const NormAsked& asked) {
  if (asked.of_list) return at::_foreach_norm({value}, asked.order, asked.dtype).front();
  return at::linalg_vector_norm(value, asked.order, {}, false, asked.dtype);
}

/// Replaces the defined norms by copies, with one kernel: a product with 1 keeps the bits.
void give_copies(std::vector<at::Tensor>& norms) {
  std::vector<at::Tensor> known;
  for (const at::Tensor& each : norms) {
    if (each.defined()) known.push_back(each);
  }
  if (known.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> copies = at::_foreach_mul(known, 1);
  auto copy = copies.begin();
  for (at::Tensor& each : norms) {
    if (each.defined()) each = std::move(*copy++);
  }
}

}  // namespace

void ShownGradients::add(std::unique_ptr<HeldGradient> held) {
  if (held) held->listen(shared_from_this(), static_cast<int>(gradients_.size()));
  gradients_.push_back({std::move(held), {}});
}

// ---- on the way ---------------------------------------------------------------------------------------------------

void ShownGradients::begin_backward(bool is_last) {
  asks_.clear();
  if (is_last && !callbacks_.norms_of_parts) asks_ = asked_last_;
  for (Gradient& each : gradients_) {
    if (each.held) each.known.clear();
  }
}

void ShownGradients::arrived(int number, const at::Tensor& value) {
  Gradient& gradient = gradients_[index(number)];
  gradient.known.clear();
  const bool is_dead = is_used_up(number);
  if ((asks_.empty() && !is_dead) || value.numel() == 0) return;
  const at::NoGradGuard no_grad;
  std::set<Question> asks = asks_;
  if (is_dead) asks.insert({{kUsual}, {kLargest}});  // the bytes will be gone later
  if (is_dead && !value.is_cpu()) asks.insert({kOneByOne});
  at::Tensor unscaled;
  for (const Question& asked : asks) {
    if (asked.is_unscaled && !unscaled.defined()) {
      if (!rehearsed_by_.defined()) continue;
      unscaled = value.clone();
      multiply_by(unscaled, {Scale::By::unscaling, rehearsed_by_, 1});
    }
    gradient.known.push_back({asked, norm_of(asked.is_unscaled ? unscaled : value, asked.norm)});
  }
}

// ---- the step -----------------------------------------------------------------------------------------------------

void ShownGradients::begin_step() {
  asked_last_ = std::exchange(asked_, {});
  compared_ = at::Tensor();
}

void ShownGradients::apply_scales(int number) {
  Gradient& gradient = gradients_[index(number)];
  if (!gradient.held || gradient.held->scales().empty()) return;
  gradient.known.clear();
  gradient.held->apply_scales();
}

// ---- Listener -----------------------------------------------------------------------------------------------------

void ShownGradients::before_read(int number) {
  Gradient& gradient = gradients_[index(number)];
  if (gradient.held->scales().empty() || gradient.held->is_dead()) return;
  callbacks_.before_write(number);
  apply_scales(number);
}

void ShownGradients::before_write(int number) {
  Gradient& gradient = gradients_[index(number)];
  gradient.known.clear();
  if (gradient.held->is_dead()) return;  // an access raises by itself
  callbacks_.before_write(number);
  gradient.held->apply_scales();
  gradient.held->unguard();  // the operator's own access needs no callback
}

void ShownGradients::after_write(int number) { gradients_[index(number)].held->guard(); }

void ShownGradients::before_raw_write(int number) {
  Gradient& gradient = gradients_[index(number)];
  gradient.held->note_taken();
  gradient.known.clear();
  callbacks_.before_write(number);
  gradient.held->apply_scales();
}

bool ShownGradients::is_whole(int number, const at::Tensor& tensor) const {
  return gradients_[index(number)].held->is(tensor);
}

bool ShownGradients::are_settled(const std::vector<int>& numbers) const {
  return std::all_of(numbers.begin(), numbers.end(), callbacks_.is_settled);
}

std::vector<at::Tensor> ShownGradients::norms(const std::vector<int>& numbers, const NormAsked& asked) {
  if (!are_settled(numbers)) return std::vector<at::Tensor>(numbers.size());
  if (callbacks_.norms_of_parts) return callbacks_.norms_of_parts(numbers, asked);
  std::vector<at::Tensor> norms;
  for (const int number : numbers) {
    Gradient& gradient = gradients_[index(number)];
    if (!gradient.held->is_private()) {
      norms.emplace_back();
      continue;
    }
    const std::vector<Scale>& scales = gradient.held->scales();
    const bool is_unscaled = scales.size() == 1 && scales.front().by == Scale::By::unscaling;
    if (!scales.empty() && !is_unscaled) {
      norms.emplace_back();  // norms after a clip are never taken ahead
      continue;
    }
    const Question question{asked, is_unscaled};
    asked_.insert(question);
    norms.push_back(is_unscaled && !is_as_rehearsed(*gradient.held) ? at::Tensor() : answer(gradient, question));
  }
  give_copies(norms);
  return norms;
}

at::Tensor ShownGradients::answer(const Gradient& gradient, const Question& question) {
  const auto find = [&](const Question& wanted) {
    return std::find_if(gradient.known.begin(), gradient.known.end(),
                        [&](const Known& each) { return each.question == wanted; });
  };
  auto known = find(question);
  if (known == gradient.known.end() && gradient.held->is_dead()) {  // the other operator's norm will do
    known = find({{!question.norm.of_list, question.norm.order, question.norm.dtype}, question.is_unscaled});
  }
  return known == gradient.known.end() ? at::Tensor() : known->norm;
}

bool ShownGradients::is_as_rehearsed(const HeldGradient& held) {
  const at::Tensor& inverse = held.scales().front().tensor;
  if (!compared_.is_same(inverse)) {
    compared_ = inverse;
    compared_value_ = inverse.item<float>();
  }
  if (rehearsed_by_.defined() && compared_value_ == rehearsed_by_value_) return true;
  rehearsed_by_ = inverse;  // for the next step
  rehearsed_by_value_ = compared_value_;
  for (Gradient& each : gradients_) {
    std::erase_if(each.known, [](const Known& known) { return known.question.is_unscaled; });
  }
  return false;
}

bool ShownGradients::may_multiply(int number) const {
  const HeldGradient& held = *gradients_[index(number)].held;
  return callbacks_.is_settled(number) && held.scales().size() < kMostScales && held.is_private();
}

void ShownGradients::multiply(int number, const Scale& scale) {
  callbacks_.before_scale(number);
  gradients_[index(number)].held->add_scale(scale);
}

std::vector<at::Tensor> ShownGradients::largest(const std::vector<int>& numbers) {
  if (callbacks_.norms_of_parts) return callbacks_.norms_of_parts(numbers, kLargest);
  asked_.insert({kLargest, false});
  std::vector<at::Tensor> found;
  for (const int number : numbers) {
    const Gradient& gradient = gradients_[index(number)];
    const bool is_as_it_came = gradient.held->scales().empty() && gradient.held->is_private();
    found.push_back(is_as_it_came ? answer(gradient, {kLargest, false}) : at::Tensor());
  }
  return found;
}

bool ShownGradients::unscale(const std::vector<int>& numbers, const at::Tensor& found_inf, const Scale& scale) {
  if (!are_settled(numbers)) return false;
  const std::vector<at::Tensor> known = largest(numbers);
  if (!std::all_of(known.begin(), known.end(), [](const at::Tensor& each) { return each.defined(); })) return false;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> together{at::stack(known)};
  if (std::any_of(numbers.begin(), numbers.end(), [this](int number) { return is_used_up(number); })) {
    // The update has been made: no scale can change it, and a scaler cannot skip it.
    return scale.tensor.item<float>() == 1 && together.front().isfinite().all().item<bool>();
  }
  at::Tensor found = found_inf;
  at::_amp_foreach_non_finite_check_and_unscale_(together, found, scale.tensor);
  const Scale by = kept(scale);
  for (const int number : numbers) {
    callbacks_.before_scale(number);
    gradients_[index(number)].held->add_scale(by);
  }
  return true;
}

}  // namespace noria
