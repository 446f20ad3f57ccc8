// ModuleVisits turns the hooks of modules into visits: it announces which units a module uses now, in forward and in
// backward.
//
// Units at rest are on the device anyway: no visit names them.
//
// Ownership: borrows the bridge's parts, the storages, the saved tensors and the rest.
// Order: a module's `enter` comes before its `leave`. A recomputation may stop early and leave modules entered.
// Threads: as TorchBridge's hooks.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bridge_parts.h"
#include "bindings/grad_hooks.h"
#include "bindings/rest.h"
#include "bindings/saved_tensors.h"
#include "bindings/storage_binding.h"

namespace noria {

class ModuleVisits {
 public:
  /// Lists what visits ask of the backwards.
  struct Upward {
    std::function<void(bool grad_enabled)> before_forward;  // raises UsageError if no forward may begin
    std::function<void()> arm;                              // this thread is in a backward
  };

  ModuleVisits(const BridgeParts& parts, StorageBinding& storages, SavedTensors& saved, const Rest& rest,
               AutogradEventsRef events, Upward upward)
      : parts_(parts),
        storages_(storages),
        saved_(saved),
        rest_(rest),
        events_(std::move(events)),
        upward_(std::move(upward)) {}

  HookId add_hook(std::string name, std::vector<UnitId> needs);

  // ---- forward ----
  void begin_forward(std::int32_t root, bool training, bool grad_enabled);
  void end_forward(const std::vector<at::Tensor>& outputs);
  void enter(HookId hook);
  /// Ends the module's visit and hooks the backward of its outputs.
  void leave(HookId hook, const std::vector<at::Tensor>& outputs);
  /// Hooks the outputs of a module inside the hook's module. If their backward comes before that of the hook's own
  /// outputs (a loss on an inner tensor), it announces the visit.
  void inner_outputs(HookId hook, const std::vector<at::Tensor>& outputs);
  bool inner_was_first(HookId hook) const { return hook_of(hook).inner_was_first; }
  /// Announces a visit for an operator that is about to use the hook's units, outside of all modules with hooks.
  void visit_for_operator(HookId hook);
  /// Announces a visit without units if none is open and the unit is known to be used by custom functions. One that
  /// computes gradients in its forward sends them before any weight is needed.
  void visit_for_gradient(UnitId unit);

  // ---- backward ----
  /// Returns true if `inner` needs a unit that `outer` lacks.
  bool is_announced_by(HookId outer, HookId inner) const;
  void announce_backward(HookId hook, bool inner);
  /// Notes that a backward begins. A forward that is open inside a module goes on afterwards.
  void begin_backward();
  void end_backward();
  /// Goes on with the forward that this backward has interrupted, as a pass of its own.
  void resume_forward();
  /// Forgets a pass that raised.
  void forget();
  /// Ends the pass of a part of the model that was called by itself.
  void end_lone_pass();

 private:
  struct Hook {
    std::string name;
    std::vector<UnitId> needs;     // sorted
    std::uint64_t sequence = 0;    // autograd's counter when its forward began
    bool inner_was_first = false;  // an output of an inner module announced its backward first
  };

  Hook& hook_of(HookId hook) { return hooks_[static_cast<std::size_t>(hook.value)]; }
  const Hook& hook_of(HookId hook) const { return hooks_[static_cast<std::size_t>(hook.value)]; }
  void announce_forward(HookId hook);
  void announce(HookId hook, Phase phase, bool recomputes = false);
  void hook_outputs(HookId hook, const std::vector<at::Tensor>& outputs, bool inner);

  const BridgeParts& parts_;
  StorageBinding& storages_;
  SavedTensors& saved_;
  const Rest& rest_;
  const AutogradEventsRef events_;
  const Upward upward_;
  std::vector<Hook> hooks_;
  Signature forward_;                     // of the forward pass that began last
  std::optional<Signature> interrupted_;  // the forward that a backward inside a module has ended
  std::set<UnitId> in_functions_;         // units that operators without gradients have used in a forward with them
  HookId for_gradients_;                  // needs no unit
  HookId first_alone_;                    // the module that began the open pass, if no root did
  std::vector<HookId> entered_;           // modules that are entered and not left, innermost last
  bool alone_ = false;                    // a part of the model was called by itself, and began the pass
};

}  // namespace noria
