// What the user's loop does with all `p.grad` of a model, and what noria knows of them without reading the home.
//
// Two things are put off or taken ahead, because on CUDA the bytes lie behind the link, and both have the bits of
// torch's own operators. *Scales*: a gradient that is multiplied (a clip, a scaler) keeps its bytes, and the update
// multiplies. *Norms*: what the loop asked of gradients after the last backward is computed for the next ones while
// they are in device memory, by the very operator that was used. Whatever else touches a gradient, or asks something
// new, finds its real bytes.
//
// Ownership: owns the held gradients; borrows what it calls back, which outlives it. Order: known norms are of the
// bytes as the last backward left them: a write, or another backward, forgets them. Threads: as Custody's hooks;
// operators of the user's come on any thread, one at a time, as in any loop.
//
// Note [Rehearsals]. A norm after an unscaling is of other numbers, rounded anew. If the loop asked for one, a copy of
// each gradient is unscaled on the way, by the inverse scale of the last step, and its norm taken. That counts only
// where the inverse scale turns out to be the same, which is asked of the device: a scaler waits for it anyway.
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
    /// Blocks until no update reads the gradient; from then on its bytes are the user's to write.
    std::function<void(int)> before_write;
    /// Runs the update by torch that is put off, if there is one: it multiplies the bytes by what the gradient had been
    /// multiplied by at `step()`.
    std::function<void(int)> before_scale;
    /// Norms where ranks hold parts of each gradient; unset where one process has all of it.
    std::function<std::vector<at::Tensor>(const std::vector<int>&, const NormAsked&)> norms_of_parts;
    /// False while a backward runs, and where ranks have not summed it: what a gradient is then, only its bytes say.
    std::function<bool(int)> is_settled;
  };

  explicit ShownGradients(Callbacks callbacks) : callbacks_(std::move(callbacks)) {}

  /// In the order of their numbers; null: frozen.
  void add(std::unique_ptr<HeldGradient> held);
  bool has(int number) const { return gradients_[index(number)].held != nullptr; }
  HeldGradient& operator[](int number) const { return *gradients_[index(number)].held; }
  std::size_t size() const { return gradients_.size(); }

  // ---- on the way ----
  /// A backward begins. `is_last`: a step is expected to follow, so that what was asked after the last one is asked
  /// again.
  void begin_backward(bool is_last);
  /// `value`, on the device, is what this gradient is so far.
  void arrived(int number, const at::Tensor& value);
  /// Its bytes are others now, or may be: nothing is known of them.
  void forget(int number) { gradients_[index(number)].known.clear(); }

  // ---- the step ----
  void begin_step();
  /// Multiplies the bytes by what the gradient has been multiplied by. The caller has the right to write them.
  void apply_scales(int number);
  /// Something that is no operator is about to write.
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
    at::Tensor norm;  // never given away: who has it may write to it
  };
  struct Gradient {
    std::unique_ptr<HeldGradient> held;
    std::vector<Known> known;
  };

  static std::size_t index(int number) { return static_cast<std::size_t>(number); }
  bool are_settled(const std::vector<int>& numbers) const;
  static at::Tensor answer(const Gradient& gradient, const Question& question);
  /// What is multiplied so far is exactly one unscaling, by what was rehearsed.
  bool is_as_rehearsed(const HeldGradient& held);

  const Callbacks callbacks_;
  std::vector<Gradient> gradients_;
  std::set<Question> asked_, asked_last_;  // since the last step; before it
  std::set<Question> asks_;                // of what arrives now
  at::Tensor rehearsed_by_;                // an inverse scale, on the device
  float rehearsed_by_value_ = 0;
  at::Tensor compared_;  // the last one that was compared with it
  float compared_value_ = 0;
};

}  // namespace noria
