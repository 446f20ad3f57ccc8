// HeldGradient makes the tensor that the user sees as `p.grad`: it is on the parameter's device, and views the held
// gradient in the home.
//
// The gradient's value is the memory's bytes times the factors in `scales`. On CUDA the bytes lie behind the link, and
// most loops only multiply a gradient, by a clip. So noria keeps the factor.
//
// Ownership: the home owns the memory. This object owns the storage that points at it, together with all aliases.
// Order: before the memory is written anew (`reuse`), an alias that the user kept gets a copy of its own. While an
// update may still read the memory, the user's first write waits. noria hears operators (bindings/listening.h), and
// watches for other accesses (`guard`).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bindings/listening.h"
#include "bindings/watched.h"

namespace noria {

class HeldGradient {
 public:
  /// `memory` is the address at which `device` reads the held gradient. `before_write` is called without the GIL, when
  /// something other than an operator asks for write access. If `why_dead` is not empty, the user's tensor has no
  /// values, and raises with that text when something asks for them.
  HeldGradient(std::byte* memory, std::int64_t num_bytes, c10::Device device, const at::Tensor& like,
               std::function<void()> before_write, std::string why_dead = {});
  ~HeldGradient();
  HeldGradient(const HeldGradient&) = delete;  // its storage is listened to
  HeldGradient& operator=(const HeldGradient&) = delete;

  /// Reports operators on the user's tensor to `listener`, with this number, unless the gradient is empty.
  void listen(const std::shared_ptr<Listener>& listener, int number);

  /// Makes noria's own reads and writes use `memory` from now on.
  void move_to(std::byte* memory);

  /// Returns the tensor to put into `p.grad`. It stays the same until something forces a new storage.
  const at::Tensor& tensor();
  /// Returns true if `gradient` is `tensor()`. A transposed or narrowed view of it is another gradient.
  bool is(const at::Tensor& gradient) const;
  /// Returns a tensor over the same memory for noria's own reads and writes. noria does not hear it, and the user never
  /// sees it.
  const at::Tensor& inner() const { return inner_; }
  bool is_dead() const { return !why_dead_.empty(); }
  /// Returns false if something can access the memory unheard and unwatched, or could before.
  bool is_private() const;
  /// Notes that something other than an operator has asked for write access.
  void note_taken() { is_taken_ = true; }

  void reuse(const at::Tensor& current_gradient);
  void guard();
  void unguard();
  /// Makes every access to its values raise.
  void kill(const std::string& why);

  // ---- what multiplies the bytes ----
  const std::vector<Scale>& scales() const { return scales_; }
  void add_scale(Scale scale) {
    scales_.push_back(std::move(scale));
    are_told_ = false;
  }
  void drop_scales() { scales_.clear(); }
  /// Returns true if updates know all scales.
  bool are_scales_told() const { return are_told_; }
  void tell_scales() { are_told_ = true; }
  /// Multiplies the bytes themselves by the scales, on the device, and drops the scales.
  void apply_scales();
  /// Multiplies `target`, which has the gradient's dtype, as the user's operators would have.
  void scale(const at::Tensor& target) const;

 private:
  at::Tensor make() const;
  bool shares_memory(const at::Tensor& gradient) const;

  std::byte* memory_;
  const std::int64_t num_bytes_;
  const c10::Device device_;
  const at::ScalarType dtype_;
  const std::vector<std::int64_t> sizes_;
  const std::vector<std::int64_t> strides_;
  const BeforeWrite before_write_;
  const std::string why_dead_;
  std::weak_ptr<Listener> listener_;
  int number_ = 0;
  at::Tensor inner_;
  at::Tensor seen_;       // undefined until `tensor` is called
  c10::Storage storage_;  // of `seen_` when it was made: `p.grad.data = x` gives `seen_` another
  bool is_taken_ = false;
  std::vector<Scale> scales_;
  bool are_told_ = false;
};

}  // namespace noria
