// Makes tensors that noria listens to: noria hears of every operator that touches such a tensor, before the operator
// runs.
//
// `p.grad` shows memory of the home. Updates read that memory, so noria must know before anything writes it. It is
// host memory, so an operator on the device should not read it if noria knows the answer.
//
// Such a tensor has one more dispatch key, with a fallback by noria; torch does the same for lazy conjugation. Each
// alias that an operator or `.data` makes has the key, too. To Python the tensor is a plain torch.Tensor. Note [Keys]
// in listening.cpp says which keys, and why. Accesses without an operator (numpy, `data_ptr()`, extensions) are noticed
// by the storage itself: bindings/watched.h.
//
// Ownership: a listener is borrowed. If it is gone, operators simply run.
// Threads: a listener is called on the thread that runs the operator, without the GIL; `after_write` with or without
// it. It may run operators itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>

#include <compare>
#include <memory>
#include <optional>
#include <vector>

namespace noria {

/// Describes a norm of a whole tensor, and the operator that takes it. The answer has that operator's bits, unless the
/// tensor can no longer be read.
struct NormAsked {
  bool of_list = false;  // true: _foreach_norm; false: linalg_vector_norm
  double order = 2;
  std::optional<at::ScalarType> dtype;
  auto operator<=>(const NormAsked&) const = default;
};

/// Describes a factor of a tensor, and the operator that multiplies. Operators round differently.
struct Scale {
  enum class By : std::uint8_t { tensor, number, unscaling } by = By::number;
  at::Tensor tensor;  // one element
  double number = 1;
};

/// Multiplies `target` as that operator does, but sets no `found_inf`: the user's unscaling has set it.
void multiply_by(const at::Tensor& target, const Scale& scale);

/// Returns the same scale, with its own copy of the tensor.
Scale kept(const Scale& scale);

/// Operators call Listener before and after they use a tensor. Each tensor has a number, which the calls name. The
/// functions of this base class do nothing.
class Listener {
 public:
  virtual ~Listener() = default;

  virtual void before_read(int /*number*/) {}
  virtual void before_write(int /*number*/) {}
  /// Called after the operator has returned or raised.
  virtual void after_write(int /*number*/) {}
  /// Called if the operator has raised. May raise an error that says more.
  virtual void failed(int /*number*/) {}
  /// Returns true if `tensor`, which shares memory with this one, is exactly the whole of it.
  virtual bool is_whole(int /*number*/, const at::Tensor& /*tensor*/) const { return false; }

  // The members below are called for whole tensors only. If the listener does not answer, the operator runs.
  /// Returns one norm for each number; undefined if it is not known without reading.
  virtual std::vector<at::Tensor> norms(const std::vector<int>& numbers, const NormAsked& /*asked*/) {
    return std::vector<at::Tensor>(numbers.size());
  }
  virtual bool may_multiply(int /*number*/) const { return false; }
  /// Makes the tensor count as multiplied. The scale's own tensor will not change.
  virtual void multiply(int /*number*/, const Scale& /*scale*/) {}
  /// Does what `_amp_foreach_non_finite_check_and_unscale_` does, for all of the tensors or for none. Returns true if
  /// it did.
  virtual bool unscale(const std::vector<int>& /*numbers*/, const at::Tensor& /*found_inf*/, const Scale& /*scale*/) {
    return false;
  }
};

/// Registers the fallbacks. Order: once, when the extension module is made.
void register_listening();

/// Returns a new tensor over all of `storage`, which can be listened to. If a caller asks it for its storage (as
/// Python's deepcopy does), that counts as reading. The same holds for results of `detach()` and `.data`.
at::Tensor listened_tensor_in(const c10::Storage& storage, c10::Device device, at::ScalarType dtype,
                              at::IntArrayRef sizes, at::IntArrayRef strides);
/// Returns the keys that a tensor needs besides its device's, if only torch's writing operators are to be heard. Other
/// operators then cost nothing more. On CUDA the storage cannot tell what was written. Multi-tensor kernels
/// (`_foreach_*_`, fused optimizers) write without asking it; other kernels ask it for write access and only read.
c10::DispatchKeySet written_keys();

/// Reports operators on tensors in this storage to `listener`, until the listener is gone or `stop_listening` is
/// called.
void listen(const c10::Storage& storage, const std::shared_ptr<Listener>& listener, int number);
void stop_listening(const c10::Storage& storage);

}  // namespace noria
