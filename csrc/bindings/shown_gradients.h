// ShownGradients follows what the user's loop does with the `p.grad` tensors of a model, and answers without reading
// the home if it can.
//
// On CUDA the gradients' bytes lie behind the link. noria therefore delays one thing and computes another ahead of
// time; both give the bits of torch's own operators. *Scales*: if the loop multiplies a gradient (a clip, a scaler),
// the bytes stay as they are, and the update multiplies. *Norms*: noria takes the norms that the loop asked for after
// the last backward. It takes them with the same operator, while the next gradients are in device memory. Every other
// operator, and every new question, finds the real bytes.
//
// Ownership: owns the held gradients; borrows what its callbacks use, which outlives it.
// Order: a known norm is of the bytes that the last backward left. A write or another backward discards it.
// Threads: as TorchBridge's hooks. The user's operators come on any thread, one at a time.
//
// Note [Rehearsals]. A norm after an unscaling is a norm of other numbers, rounded anew. If the loop asked for one,
// noria copies each gradient as it arrives. It unscales the copy by the last step's inverse scale, and takes the copy's
// norm. That norm counts only if the inverse scale turns out to be the same. noria reads the inverse scale from the
// device to compare it; a scaler waits for the device anyway.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "bindings/held_gradient.h"
#include "bindings/listening.h"

namespace noria {

class ShownGradients final : public Listener, public std::enable_shared_from_this<ShownGradients> {
 public:
  struct Callbacks {
    /// Blocks until no update reads the gradient. After that the user may write its bytes.
    std::function<void(int)> before_write;
    /// Runs the deferred update of kernel="torch", if there is one. It multiplies the bytes by the factors that the
    /// gradient had at `step()`.
    std::function<void(int)> before_scale;
    /// Returns norms if ranks hold parts of each gradient. Unset if one process has all of it.
    std::function<std::vector<at::Tensor>(const std::vector<int>&, const NormAsked&)> norms_of_parts;
    /// Returns false while a backward runs, or if ranks have not reduced the gradient. Then only the bytes tell its
    /// value.
    std::function<bool(int)> is_settled;
  };

  explicit ShownGradients(Callbacks callbacks) : callbacks_(std::move(callbacks)) {}

  /// Adds the next gradient; null if its parameter is frozen. Order: by number.
  void add(std::unique_ptr<HeldGradient> held);
  bool has(int number) const { return gradients_[index(number)].held != nullptr; }
  HeldGradient& operator[](int number) const { return *gradients_[index(number)].held; }

  // ---- on the way ----
  /// Called when a backward begins. `is_last`: a step is expected to follow, so noria takes the norms that the loop
  /// asked for after the last backward.
  void begin_backward(bool is_last);
  /// Called when a gradient arrives. `value`, on the device, is the gradient so far.
  void arrived(int number, const at::Tensor& value);
  /// Discards what is known of a gradient whose bytes have changed, or may have.
  void forget(int number) { gradients_[index(number)].known.clear(); }

  // ---- the step ----
  void begin_step();
  /// Multiplies the bytes by the gradient's scales. Order: the caller has made sure that it may write them.
  void apply_scales(int number);
  /// Called before a write that no operator makes.
  void before_raw_write(int number);

  // ---- Listener ----
  void before_read(int number) override;
  void before_write(int number) override;
  void after_write(int number) override;
  bool is_whole(int number, const at::Tensor& tensor) const override;
  std::vector<at::Tensor> norms(const std::vector<int>& numbers, const NormAsked& asked) override;
  bool may_multiply(int number) const override;
  void multiply(int number, const Scale& scale) override;
  bool unscale(const std::vector<int>& numbers, const at::Tensor& found_inf, const Scale& scale) override;

 private:
  struct Question {
    NormAsked norm;
    bool is_unscaled = false;  // asked after an unscaling: Note [Rehearsals]
    auto operator<=>(const Question&) const = default;
  };
  struct Known {
    Question question;
    at::Tensor norm;  // callers get a copy, because they may write to it
  };
  struct Gradient {
    std::unique_ptr<HeldGradient> held;
    std::vector<Known> known;
  };

  static std::size_t index(int number) { return static_cast<std::size_t>(number); }
  bool are_settled(const std::vector<int>& numbers) const;
  /// Returns true if an update inside backward uses the gradient, in one process: then only what was taken as it
  /// arrived is known.
  bool is_used_up(int number) const { return gradients_[index(number)].held->is_dead() && !callbacks_.norms_of_parts; }
  /// Returns the largest magnitudes; undefined where it is not known. Gradients that ranks share are asked for on all.
  std::vector<at::Tensor> largest(const std::vector<int>& numbers);
  static at::Tensor answer(const Gradient& gradient, const Question& question);
  /// Returns true if the gradient's only scale, an unscaling, equals the rehearsed one. Otherwise it notes this scale
  /// for the next step.
  bool is_as_rehearsed(const HeldGradient& held);

  const Callbacks callbacks_;
  std::vector<Gradient> gradients_;
  std::set<Question> asked_, asked_last_;  // since the last step; in the step before
  std::set<Question> asks_;                // the questions to answer as gradients arrive
  at::Tensor rehearsed_by_;                // an inverse scale, on the device
  float rehearsed_by_value_ = 0;
  at::Tensor compared_;  // the inverse scale that was compared with it last
  float compared_value_ = 0;
};

}  // namespace noria
