// Backwards follows autograd: it finds where a backward begins, where it ends, and that it has raised.
//
// Ownership: borrows the bridge's parts and the owners beside it.
// Order: `begin_pass` of a backward comes with its first hook, `end_pass` with its last graph task.
// Threads: as TorchBridge's hooks.
//
// Note [Graph tasks]. A graph task is one call of torch's engine; a checkpoint may nest one in another. queue_callback
// runs a callback once per task, and not after an exception. The callback of a task that is not nested ends the
// backward. That of a nested task ends it only if no other task is armed.
// The callback holds a token. Autograd destroys it with the task, so noria also learns of a task that raised.
#pragma once

#include <future>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/backward_claims.h"
#include "bindings/gradient_catcher.h"
#include "bindings/home_view.h"
#include "bindings/module_visits.h"
#include "bindings/rank_audit.h"
#include "bindings/rest.h"

namespace noria {

/// Lists what a backward moves and asks. The bridge owns all of it.
struct BackwardOwners {
  StorageBinding& storages;
  SavedTensors& saved;
  GradientViews& views;
  GradientCatcher& catcher;
  ModuleVisits& visits;
  BackwardClaims& claims;
  HomeView& home;
  RankAudit& audit;
  Rest& rest;
};

class Backwards final : public AutogradEvents {
 public:
  Backwards(const BridgeParts& parts, BackwardOwners owners, AutogradEventsRef events)
      : parts_(parts),
        owners_(owners),
        events_(std::move(events)) {}

  /// Raises UsageError if no forward may begin. Prepares for its backward.
  void before_forward(bool grad_enabled);
  /// Begins a backward, unless one is open. Order: autograd runs a graph task on this thread.
  void arm();
  /// Forgets a backward that raised, if there is one.
  void recover();
  /// Forgets a forward that raised, if there is one.
  void abandon_forward();
  /// Forgets a backward that is over and has not ended, because it raised.
  void forget_failed();
  /// Sets whether gradients stay this rank's own, or are reduced over all ranks.
  void set_unsynced(bool unsynced);

  // ---- AutogradEvents ----
  void backward_begins(HookId hook, bool inner) override;
  torch::autograd::variable_list catch_gradient(int index, const torch::autograd::variable_list& gradients) override;
  void after_accumulate(int index) override { owners_.catcher.after_accumulate(index); }
  bool is_announced_by(HookId outer, HookId inner) const override {
    return owners_.visits.is_announced_by(outer, inner);
  }

 private:
  struct Armed {
    int task;
    std::shared_future<void> over;  // ready when autograd has let go of the task
  };

  void begin();
  void task_ended(int task);
  void finish();
  void share_arrivals();
  void await_failed();
  void reset();

  const BridgeParts& parts_;
  const BackwardOwners owners_;
  const AutogradEventsRef events_;
  std::vector<Armed> armed_;  // graph tasks that have begun and not ended
  std::thread::id trains_;    // the thread of the last forward
  bool unsynced_ = false;
};

}  // namespace noria
