// What the user sees as `p.grad`: a tensor on the parameter's device that views the held gradient in the home.
//
// Its value is the memory's bytes times what it has been multiplied by since (`scales`): on CUDA the bytes lie behind
// the link, and most loops multiply a gradient once, by a clip, and never look at it again.
//
// Ownership: the memory is the home's; the storage that points at it belongs to this object and to whoever keeps an
// alias. Order: before the memory is written anew (`reuse`), an alias that the user kept is given a copy of its own.
// While an update may still read the memory, or something is known of it, the first write must wait: operators are
// heard (bindings/listening.h), and what goes around them is watched (`guard`).
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
  /// `memory` is the address under which `device` reads the held gradient. `before_write` is called without the GIL,
  /// when something that is no operator asks for write access. `why_dead` not empty: what the user gets has no values,
  /// and says so whenever they are asked for.
  HeldGradient(std::byte* memory, std::int64_t num_bytes, c10::Device device, const at::Tensor& like,
               std::function<void()> before_write, std::string why_dead = {});
  ~HeldGradient();
  HeldGradient(const HeldGradient&) = delete;  // its storage is listened to
  HeldGradient& operator=(const HeldGradient&) = delete;

  /// Operators on what the user sees come to `listener`, by this number, unless it is empty.
  void listen(const std::shared_ptr<Listener>& listener, int number);

  /// Our own reads and writes go there from now on.
  void move_to(std::byte* memory);

  /// The tensor to put into `p.grad`; the same one as long as nothing forced a new storage.
  const at::Tensor& tensor();
  /// True for `tensor()` itself; a transposed or narrowed view of it is another gradient.
  bool is(const at::Tensor& gradient) const;
  /// A tensor over the same memory for our own reads and writes: never heard, never seen by the user.
  const at::Tensor& inner() const { return inner_; }
  bool is_dead() const { return !why_dead_.empty(); }
  /// False: somebody has a way to the memory that is neither heard nor watched, or has had.
  bool is_private() const;
  /// Something that is no operator has asked for write access.
  void note_taken() { is_taken_ = true; }

  void reuse(const at::Tensor& current_gradient);
  void guard();
  void unguard();
  /// Its values can no longer be asked for.
  void kill(const std::string& why);

  // ---- what multiplies the bytes ----
  const std::vector<Scale>& scales() const { return scales_; }
  void add_scale(Scale scale) {
    scales_.push_back(std::move(scale));
    are_told_ = false;
  }
  void drop_scales() { scales_.clear(); }
  /// Whether updates know them all.
  bool are_scales_told() const { return are_told_; }
  void tell_scales() { are_told_ = true; }
  /// Multiplies the bytes themselves, on the device.
  void apply_scales();
  /// Multiplies `target`, of the gradient's dtype, as the user's operators would have.
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
  at::Tensor seen_;       // undefined until first asked for
  c10::Storage storage_;  // what `seen_` was made with: `p.grad.data = x` gives it another
  bool is_taken_ = false;
  std::vector<Scale> scales_;
  bool are_told_ = false;
};

}  // namespace noria
