// GradientCatcher catches the gradients of parameters, and writes them into the buffers that the engine opens.
//
// Ownership: owns the storages of the gradient buffers. Keeps the AccumulateGrad nodes alive, because they have noria's
// hooks. Borrows the bridge's parts and the gradient views.
// Threads: as TorchBridge's hooks.
//
// Note [Gradients]. The catcher takes a gradient before AccumulateGrad sees it. It writes the gradient into the unit's
// gradient buffer on the compute stream, and gives AccumulateGrad nothing. When the outermost backward ends, noria sets
// `p.grad`. Two cases are left to AccumulateGrad. If the user has post-accumulate hooks on a parameter, they must see
// `p.grad`; the catcher takes what `p.grad` holds after them. If the user has put a tensor into `p.grad`,
// AccumulateGrad adds to it in place, as in torch.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "bindings/bridge_parts.h"
#include "bindings/grad_hooks.h"
#include "bindings/gradient_views.h"
#include "bindings/rest.h"
#include "bindings/torch_compat.h"
#include "bindings/unit_storage.h"
#include "comm/collectives.h"

namespace noria {

class GradientCatcher {
 public:
  GradientCatcher(const BridgeParts& parts, GradientViews& views) : parts_(parts), views_(views) {}

  /// Makes the storages of the buffers. They show nothing yet.
  void bind(const UnitMap<BridgedUnit>& units);
  /// Makes and hooks the AccumulateGrad nodes of what streams, on the current stream. Hooks call `events`.
  void make_accumulators(const AutogradEventsRef& events, const Rest& rest);
  /// Lets the nodes of these units go, and with them the hooks, once no graph has them. torch then makes others.
  void drop_accumulators(const std::vector<UnitId>& units);
  /// Raises UsageError if the open backward returns gradients of parameters (torch.autograd.grad).
  void refuse_captured() const;
  bool has(const c10::Storage& storage) const;

  // ---- a gradient ----
  /// Returns false if autograd drops the gradient: it is undefined, or its parameter was frozen after its forward.
  bool is_wanted(int index, const torch::autograd::variable_list& gradients) const;
  /// Returns what AccumulateGrad gets. Order: a backward is open.
  torch::autograd::variable_list take(int index, const torch::autograd::variable_list& gradients);
  void after_accumulate(int index);
  /// Returns the held parts of the unit's gradients that new ones are added to, and that the user does not write.
  Ranges held_gradients(UnitId unit) const;

  // ---- buffers ----
  void open(UnitId unit, std::byte* buffer);
  /// `is_drained`: what was written there replaces the held gradient.
  void close(UnitId unit, bool is_drained);

  // ---- what has arrived in this backward ----
  ParameterSet arrived() const;
  /// Notes what has arrived on any rank. Returns the offsets of all arrived gradients, by unit.
  std::map<UnitId, std::set<Bytes>> note_arrived(const ParameterSet& arrived);
  /// Returns the indices of what has arrived, and forgets them.
  std::vector<int> take_arrived();
  /// Forgets a backward that raised.
  void forget();

 private:
  struct Caught {
    NodePtr accumulator;
    at::Tensor buffer;        // view of the unit's gradient storage
    bool written = false;     // into the buffer that is open now
    bool arrived = false;     // in this backward
    bool take_after = false;  // AccumulateGrad goes first, see Note [Gradients]
  };

  Caught& caught(int index) { return caught_[static_cast<std::size_t>(index)]; }
  const Caught& caught(int index) const { return caught_[static_cast<std::size_t>(index)]; }
  void refuse_foreign_hooks(int index) const;
  bool adds_to_held(int index) const;
  /// Returns true if the value that the gradient is added to is in the buffer already.
  bool is_brought(int index) const;
  void write(int index, const at::Tensor& gradient);

  const BridgeParts& parts_;
  GradientViews& views_;
  UnitMap<std::unique_ptr<UnitStorage>> buffers_;  // null: frozen
  std::vector<Caught> caught_;                     // by parameter
  Stream accumulators_stream_;
};

}  // namespace noria
