// GradientViews says what `p.grad` shows: the held gradient, or one of the user's own. It keeps the factors that the
// held one was multiplied by (late scales).
//
// Ownership: owns the held gradients and what is known of them. Borrows the bridge's parts.
// Order: one call of `bind` before all else.
// Threads: as TorchBridge's hooks. The user's operators come on any thread, one at a time.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/bridge_parts.h"
#include "bindings/held_gradient.h"
#include "bindings/shown_gradients.h"

namespace noria {

enum class GradientIs { none, held, foreign };

class GradientViews {
 public:
  explicit GradientViews(const BridgeParts& parts);
  ~GradientViews() { end(); }
  GradientViews(const GradientViews&) = delete;  // held gradients call it
  GradientViews& operator=(const GradientViews&) = delete;

  /// Makes the held gradients. They keep `held_home`, because a gradient that the user kept outlives this object.
  void bind(const UnitMap<BridgedUnit>& units, const std::shared_ptr<void>& held_home);
  /// From now on, writes without an operator to gradients that the user kept call nothing.
  void end() { *self_ = nullptr; }

  /// Lists what the caller does with gradients that ranks share.
  struct RankParts {
    std::function<std::vector<at::Tensor>(const std::vector<int>&, const NormAsked&)> norms;
    std::function<void(int)> multiply;  // multiplies this rank's shard by the scales, and drops them
  };
  void set_rank_parts(RankParts parts) { rank_parts_ = std::move(parts); }

  // ---- what p.grad is ----
  GradientIs is(int index) const;
  bool has_held(int index) const { return shown_->has(index); }
  HeldGradient& held(int index) const { return (*shown_)[index]; }
  /// Copies a gradient that the user put into `p.grad` into the held gradient.
  void take_foreign(int index);
  /// Shows a gradient that is in the home already, where ranks share it: later backwards add to it.
  void take_part(int index);
  /// Drops accumulated gradients that p.grad no longer shows: no update may use them. Raises UsageError if p.grad is
  /// the user's own.
  void drop_cleared();
  /// Returns true if p.grad stands for a gradient that is not reduced over the ranks.
  bool is_unreduced(int index) const;
  /// Raises UsageError if there is such a gradient.
  void refuse_unreduced() const;

  // ---- a backward ----
  /// `is_last`: a step is expected to follow.
  void begin_backward(bool is_last) { shown_->begin_backward(is_last); }
  /// `value`, on the device, is the gradient so far.
  void arrived(int index, const at::Tensor& value) { shown_->arrived(index, value); }
  /// Sets `p.grad` to the held gradient, unless it is set.
  void show(int index);
  /// Multiplies held parts by their scales, because this backward adds to them.
  void multiply_parts();

  // ---- writes ----
  /// Makes the first write to a held gradient wait for the updates. Order: after the updates were issued.
  void guard();
  /// The same for the gradients of one unit.
  void guard(UnitId unit);
  void held_moved(UnitId unit, std::byte* held);

  // ---- the step, and factors ----
  /// Queues what updates must know of the gradients, and begins the engine's step.
  void begin_step();
  /// Returns where updates find the factors of the gradient, and how many there are. Order: after `begin_step`.
  std::pair<const float*, int> late_scales(int index) const;
  /// Returns the same factors and drops them, for an update that multiplies the bytes in the home by them.
  std::vector<float> take_scales(int index);
  /// Returns the factors as numbers. It reads them from the device.
  std::vector<float> scale_values(int index) const;
  void drop_scales(int index);
  /// Returns the first of these gradients that has a factor other than exactly 1, or -1 if there is none.
  int first_scaled(const std::vector<int>& indices) const;
  /// Multiplies the gradient's bytes by its factors, and forgets its norms: the caller will write the bytes.
  /// Returns true if the device multiplies when its stream gets there. Until then the host must not read or write the
  /// bytes.
  bool apply_scales(int index);
  /// Multiplies gradients that a step has used by `inverse`. They count as unscaled afterwards.
  void unscale_used(const std::vector<int>& indices, const at::Tensor& inverse);

 private:
  /// Called when the user is about to write a held gradient, which an update may still read.
  void before_write(UnitId unit);
  void write_scales(const std::vector<int>& indices);
  [[noreturn]] static void refuse_foreign(const Parameter& refused);

  const BridgeParts& parts_;
  const std::shared_ptr<GradientViews*> self_;  // held by gradients that the user may keep
  std::shared_ptr<ShownGradients> shown_;       // by parameter
  RankParts rank_parts_;
};

}  // namespace noria
