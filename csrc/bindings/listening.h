// Tensors that noria listens to: every operator that touches one comes by here before it runs.
//
// What for: `p.grad` shows memory of the home that updates read, that lies behind the link, and of which much is known
// without reading it. So noria must hear of each write before it happens, and may answer some operators itself.
//
// How: such a tensor has one more dispatch key, for which noria has a fallback, as torch has for lazy conjugation. The
// key goes with every alias that an operator or `.data` makes; to Python the tensor is a plain torch.Tensor. Keys and
// why these: Note [Keys] in listening.cpp. What goes around operators (numpy, `data_ptr()`, extensions) is heard by the
// storage itself: bindings/watched.h.
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

/// Somebody who listens to tensors, each by a number of his.
class Listener {
 public:
  virtual ~Listener() = default;

  virtual void before_read(int number) = 0;
  virtual void before_write(int number) = 0;
  /// The operator is through, or has raised.
  virtual void after_write(int number) = 0;
  /// True if `tensor`, which shares memory with this one, is all of it and nothing else.
  virtual bool is_whole(int number, const at::Tensor& tensor) const = 0;

  // The rest is asked of whole tensors alone. What is not answered, the operator does itself.
  /// One for each number; undefined: not known without reading.
  virtual std::vector<at::Tensor> norms(const std::vector<int>& numbers, const NormAsked& asked) = 0;
  /// True: from now on the tensor counts as multiplied.
  virtual bool multiply(int number, const Scale& scale) = 0;
  /// As `_amp_foreach_non_finite_check_and_unscale_`, of all of them or of none.
  virtual bool unscale(const std::vector<int>& numbers, const at::Tensor& found_inf, const Scale& scale) = 0;
};

/// Once, when the module is made.
void register_listening();

/// A tensor that is all of a storage, with what it takes to be heard. Whoever asks it, or what `detach()` and `.data`
/// make of it, for the storage itself (Python's deepcopy does) counts as reading.
at::Tensor listened_tensor_in(const c10::Storage& storage, c10::Device device, at::ScalarType dtype,
                              at::IntArrayRef sizes, at::IntArrayRef strides);
/// The keys, beside its device's, that a tensor needs of which only torch's operators that write are listened to;
/// others cost nothing. On CUDA multi-tensor kernels (`_foreach_*_`, fused optimizers) write without a word to the
/// storage, and a storage that is asked for write access may only have been read.
c10::DispatchKeySet written_keys();

/// From now on operators on tensors in this storage come to `listener`, until it is gone or `stop_listening`.
void listen(const c10::Storage& storage, const std::shared_ptr<Listener>& listener, int number);
void stop_listening(const c10::Storage& storage);

}  // namespace noria
