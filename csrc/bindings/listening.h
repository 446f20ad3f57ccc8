// Tensors that noria listens to: every operator that touches one comes by here before it runs.
//
// `p.grad` shows memory of the home. Updates read that memory, so noria must know before anybody writes it. It lies
// behind the link, so operators whose answer noria knows need not read it.
//
// Such a tensor has one more dispatch key, for which noria has a fallback, as torch has for lazy conjugation. Every
// alias that an operator or `.data` makes has the key, too; to Python the tensor is a plain torch.Tensor. Note [Keys]
// in listening.cpp says which keys, and why. What goes around operators (numpy, `data_ptr()`, extensions) is heard by
// the storage itself: bindings/watched.h.
//
// Ownership: a listener is borrowed, and may be gone: then operators simply run. Threads: a listener is called on
// whatever thread runs the operator, with or without the GIL, and may run operators itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>

#include <compare>
#include <memory>
#include <optional>
#include <vector>

namespace noria {

/// A norm of a whole tensor, and the operator that takes it: its answer must have the bits of that operator.
struct NormAsked {
  bool of_list = false;  // _foreach_norm, or linalg_vector_norm
  double order = 2;
  std::optional<at::ScalarType> dtype;
  auto operator<=>(const NormAsked&) const = default;
};

/// What multiplies a tensor, by which operator: they round in different ways.
struct Scale {
  enum class By : std::uint8_t { tensor, number, unscaling } by = By::number;
  at::Tensor tensor;  // one element
  double number = 1;
};

/// Multiplies `target` as that operator does, but sets no `found_inf`: that was set when the user unscaled.
void multiply_by(const at::Tensor& target, const Scale& scale);

/// Returns the same scale, with its own copy of the tensor.
Scale kept(const Scale& scale);

/// Somebody who listens to tensors, each by a number of his. As it stands here, it answers nothing.
class Listener {
 public:
  virtual ~Listener() = default;

  virtual void before_read(int /*number*/) {}
  virtual void before_write(int /*number*/) {}
  /// The operator is through, or has raised.
  virtual void after_write(int /*number*/) {}
  /// True if `tensor`, which shares memory with this one, is all of it and nothing else.
  virtual bool is_whole(int /*number*/, const at::Tensor& /*tensor*/) const { return false; }

  // The rest is asked of whole tensors alone. What is not answered, the operator does itself.
  /// One for each number; undefined: not known without reading.
  virtual std::vector<at::Tensor> norms(const std::vector<int>& numbers, const NormAsked& /*asked*/) {
    return std::vector<at::Tensor>(numbers.size());
  }
  virtual bool may_multiply(int /*number*/) const { return false; }
  /// From now on the tensor counts as multiplied. The scale's own tensor will not change.
  virtual void multiply(int /*number*/, const Scale& /*scale*/) {}
  /// As `_amp_foreach_non_finite_check_and_unscale_`, of all of them or of none.
  virtual bool unscale(const std::vector<int>& /*numbers*/, const at::Tensor& /*found_inf*/, const Scale& /*scale*/) {
    return false;
  }
};

/// Once, when the module is made.
void register_listening();

/// A new tensor over all of `storage`, which can be listened to. Asking it for its storage (Python's deepcopy does)
/// counts as reading; so does asking what `detach()` and `.data` make of it.
at::Tensor listened_tensor_in(const c10::Storage& storage, c10::Device device, at::ScalarType dtype,
                              at::IntArrayRef sizes, at::IntArrayRef strides);
/// The keys that a tensor needs beside its device's, if only torch's operators that write are to be heard; all others
/// cost nothing. The storage cannot tell on CUDA: multi-tensor kernels (`_foreach_*_`, fused optimizers) write without
/// asking it, and other kernels ask it for write access and only read.
c10::DispatchKeySet written_keys();

/// From now on operators on tensors in this storage come to `listener`, until it is gone or `stop_listening`.
void listen(const c10::Storage& storage, const std::shared_ptr<Listener>& listener, int number);
void stop_listening(const c10::Storage& storage);

}  // namespace noria
