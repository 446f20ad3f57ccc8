// What the user sees as `p.grad`: a tensor on the parameter's device that views the held gradient in the home.
//
// Ownership: the memory is the home's; the storage that points at it belongs to this object and to whoever keeps an
// alias. Order: before the memory is written anew (`reuse`), an alias that the user kept is given a copy of its own.
// After `step()` the update may still read the memory, so the first write must wait: from torch 2.13 the storage calls
// back before it (`guard`); before, the gradient is dead (`kill`) until it is cleared.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <functional>
#include <string>
#include <vector>

#include "bindings/watched.h"

namespace noria {

class HeldGradient {
 public:
  /// `memory` is the address under which `device` reads the held gradient. `before_write` is called without the GIL.
  /// `why_dead` not empty: what the user gets has no values, and says so whenever they are asked for.
  HeldGradient(std::byte* memory, std::int64_t num_bytes, c10::Device device, const at::Tensor& like,
               std::function<void()> before_write, std::string why_dead = {});

  /// Our own reads and writes go there from now on.
  void move_to(std::byte* memory);

  /// The tensor to put into `p.grad`; the same one as long as nothing forced a new storage.
  const at::Tensor& tensor();
  /// True for `tensor()` itself; a transposed or narrowed view of it is another gradient.
  bool is(const at::Tensor& gradient) const;
  /// A tensor over the same memory for our own reads and writes: never guarded, never seen by the user.
  const at::Tensor& inner() const { return inner_; }

  void reuse(const at::Tensor& current_gradient);
  void guard();
  /// Its values can no longer be asked for.
  void kill(const std::string& why);

 private:
  at::Tensor make(const BeforeWrite& before_write) const;
  bool shares_memory(const at::Tensor& gradient) const;

  std::byte* memory_;
  const std::int64_t num_bytes_;
  const c10::Device device_;
  const at::ScalarType dtype_;
  const std::vector<std::int64_t> sizes_;
  const std::vector<std::int64_t> strides_;
  const BeforeWrite before_write_;
  const std::string why_dead_;
  at::Tensor inner_;
  at::Tensor seen_;       // undefined until first asked for
  c10::Storage storage_;  // what `seen_` was made with: `p.grad.data = x` gives it another
};

}  // namespace noria
