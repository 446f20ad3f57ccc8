// TorchBridge connects autograd with the engine: it owns the parameters' storages, and turns hooks into engine calls.
//
// Module hooks and autograd hooks call it, and it calls the engine. The engine tells it where a unit's bytes are, and
// it points the storages there. It also answers for `p.grad`, late scales and saved tensors, opens the home to the
// user, and compares steps between ranks.
// Ownership: owns the unit storages, the gradient views and the engine. Keeps the parameters and their AccumulateGrad
// nodes alive.
// Threads: hooks of one model run one at a time: on the launching thread, or on autograd's thread for the device while
// the launching thread waits in `backward`. Public members are called without the GIL. Calls back
// into Python take it: updates by torch, the beginning of a backward, more home memory, norms of shards.
//
// Note [Gradients]. The bridge catches a gradient before AccumulateGrad sees it. It writes the gradient into the unit's
// gradient buffer on the compute stream, and gives AccumulateGrad nothing. When the outermost backward ends, it sets
// `p.grad`. Two cases are left to AccumulateGrad. If the user has post-accumulate hooks on a parameter, they must see
// `p.grad`; the bridge takes what `p.grad` holds after them. If the user has put a tensor into `p.grad`, AccumulateGrad
// adds to it in place, as in torch.
//
// Note [Graph tasks]. Engine::queue_callback runs a callback once per graph task, and not after an exception. A
// backward therefore ends when the callback of a task that is not nested runs. The callback of a nested task ends it
// only if no other task is armed.
// The callback holds a token. Autograd destroys it with the task, so the bridge also learns of a task that raised.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/living.h"
#include "bindings/held_gradient.h"
#include "bindings/saved_tensors.h"
#include "bindings/shown_gradients.h"
#include "bindings/torch_compat.h"
#include "bindings/unit_storage.h"
#include "engine/engine.h"

namespace noria {

/// Describes one parameter of a unit. `gradient_offset` is -1 if the parameter was frozen when it was wrapped.
struct BridgedParameter {
  at::Tensor variable;
  std::string name;
  at::ScalarType dtype = at::kFloat;  // of the working copy
  std::int64_t offset = 0;            // bytes, in the unit's working copy
  std::int64_t gradient_offset = -1;  // bytes, in the unit's gradient layout
  float* scales = nullptr;            // in the home: the late scales of its gradient; null: it never has any

  Bytes bytes() const { return {variable.numel() * variable.element_size()}; }
};

struct BridgedUnit {
  EngineUnit engine;
  std::vector<BridgedParameter> parameters;
};

enum class GradientIs { none, held, foreign };

class TorchBridge final : public EngineCallbacks, public Living<TorchBridge> {
 public:
  TorchBridge(EngineOptions options, std::shared_ptr<Backend> backend, std::vector<BridgedUnit> units,
              BufferTable buffers, std::shared_ptr<HostOptimizer> optimizer, c10::Device device,
              const std::shared_ptr<void>& held_home, Bytes least_saved);
  ~TorchBridge() override;

  Engine& engine() { return engine_; }
  const Engine& engine() const { return engine_; }
  /// Sets what is called when an outermost backward begins that will update (update="backward").
  void set_backward_callback(std::function<void()> begin) { begin_backward_ = std::move(begin); }
  void set_update_callback(std::function<void(UnitId)> run_update) { run_update_ = std::move(run_update); }

  // ---- hooks ----
  HookId add_hook(std::string name, std::vector<UnitId> needs);

  void begin_forward(std::int32_t root, bool training, bool grad_enabled);
  void end_forward(const std::vector<at::Tensor>& outputs);
  void enter(HookId hook);
  /// Ends the module's visit and hooks the backward of its outputs.
  void leave(HookId hook, const std::vector<at::Tensor>& outputs);
  /// Hooks the outputs of a module inside the hook's module. If their backward comes before that of the hook's own
  /// outputs (a loss on an inner tensor), it announces the visit.
  void inner_outputs(HookId hook, const std::vector<at::Tensor>& outputs);
  bool inner_was_first(HookId hook) const { return hooks_[static_cast<std::size_t>(hook.value)].inner_was_first; }
  /// Announces a visit for an operator that is about to use these units, outside of any module that has a hook.
  void visit_for_operator(HookId hook);
  /// Forgets a backward that raised, if there is one.
  void recover();
  /// Forgets a forward that raised, if there is one.
  void abandon_forward();

  // ---- autograd, through grad_hooks.cpp ----
  /// Returns true if `inner` needs a unit that `outer` lacks. Then `outer` does not hook a node that `inner` has
  /// hooked.
  bool is_announced_by(HookId outer, HookId inner) const;
  void backward_begins(HookId hook, bool inner);  // hook -1: the outermost module's output
  torch::autograd::variable_list catch_gradient(int index, const torch::autograd::variable_list& gradients);
  void after_accumulate(int index);

  // ---- saved tensors ----
  using MoreHome = std::function<std::pair<std::byte*, Bytes>(Bytes)>;
  void set_saved_callback(MoreHome more_home) { more_home_ = std::move(more_home); }
  /// Do what the hooks of torch.autograd.graph.saved_tensors_hooks do.
  std::shared_ptr<SavedTensor> pack(const at::Tensor& tensor) { return saved_.pack(engine_, tensor); }
  at::Tensor unpack(const SavedTensor& saved) { return saved_.unpack(engine_, saved, current_stream()); }

  // ---- the optimizer ----
  GradientIs gradient_is(int index) const;
  /// Copies a gradient that the user put into `p.grad` into the held gradient.
  void take_foreign_gradient(int index);
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
  /// Multiplies the gradient's bytes by its factors, and forgets what was known of them: the caller will write them.
  /// Returns true if the device multiplies when its stream gets there. Until then the host must not read or write the
  /// bytes.
  bool apply_scales(int index);
  /// Multiplies gradients that a step has used by `inverse`. They count as unscaled afterwards.
  void unscale_used(const std::vector<int>& indices, const at::Tensor& inverse);
  /// What the caller does with gradients that ranks share.
  struct Parts {
    std::function<std::vector<at::Tensor>(const std::vector<int>&, const NormAsked&)> norms;
    std::function<void(int)> multiply;  // this rank's shard by the gradient's scales; drops these
  };
  void set_parts(Parts parts) { parts_ = std::move(parts); }
  /// Sets whether passes only accumulate (update="backward").
  void set_accumulating(bool accumulating);
  /// As Engine::set_last_of. Until the next call, passes need no `step` between them.
  void set_last_of(const std::optional<std::vector<UnitId>>& units);
  void hold_all(const std::vector<std::byte*>& held) { engine_.hold_all(held, current_stream()); }
  void hold_unreduced(const std::vector<std::byte*>& memory) { engine_.hold_unreduced(memory, current_stream()); }
  /// Sets whether gradients stay this rank's own, or are reduced over all ranks.
  void set_unsynced(bool unsynced);
  bool is_held_back(int index) const;
  /// Runs the updates of `step` after passes that have only accumulated. It uses the gradients that the user has not
  /// cleared since.
  void update_held();
  void refuse_unclaimed(const std::string& found) const;
  std::vector<std::vector<double>> sum_gradients(std::vector<std::pair<UnitId, UpdateJob>> jobs);
  /// Makes the first write to a held gradient wait for the updates. Order: after the updates were issued.
  void guard_gradients();

  // ---- the home ----
  /// Makes the parameters of these units show the home. If ranks share the home, no rank holds a whole unit: the
  /// parameters then show `shown`, one address for each unit. The caller fills that memory, and takes the changes from
  /// it.
  void open_home(const std::vector<UnitId>& units, const std::vector<std::byte*>& shown, bool write);
  void close_home(const std::vector<UnitId>& units, bool write);
  /// Returns true if something has asked for write access to the unit's parameters since the home was opened.
  bool is_written(UnitId unit) const { return weights_[static_cast<std::size_t>(unit.value)]->written(); }
  /// Copies the data of parameters that were given other data (`p.data = x`) into the open home. Returns the names of
  /// two parameters that were given the same memory, or an empty string. Each of these two has its own memory
  /// afterwards.
  std::string bring_home();
  /// Puts a parameter's storage back where it belongs. Returns false if it was there.
  bool rejoin(int index);
  /// Gives the parameter up for good. It becomes `replacement`.
  void release(int index, const at::Tensor& replacement);
  void close();
  /// Raises the version counters of these parameters. Autograd then raises "modified by an inplace operation" for
  /// graphs that are older than the update.
  void bump_versions(const std::vector<int>& indices);
  /// Notes that a step updates these parameters; `hyperparameters` is a checksum. Ranks that share the model compare
  /// all steps at the end of each backward that sums.
  void note_step(const std::vector<int>& updated, std::uint32_t hyperparameters);
  /// Returns the numbers of all ranks, by rank, for what all ranks do together. Each rank gives the same count. Raises
  /// UsageError if the ranks' steps until now differ.
  std::vector<std::int64_t> exchange(std::vector<std::int64_t> numbers);
  Stream current_stream() const;

  // ---- EngineCallbacks ----
  void attach(UnitId unit, std::byte* weights) override;
  bool evict(UnitId unit) override;
  void open_gradients(UnitId unit, std::byte* buffer) override;
  void close_gradients(UnitId unit, bool is_drained) override;
  Ranges held_gradients(UnitId unit) const override;
  void home_moved(UnitId unit, std::byte* working) override;
  void held_moved(UnitId unit, std::byte* held) override;
  void update(UnitId unit) override { run_update_(unit); }
  std::pair<std::byte*, Bytes> more_home(Bytes least) override { return more_home_(least); }
  std::byte* make_room(SavedId saved, Bytes bytes) override {
    return saved_.make_room(saved, bytes, /*poisoned=*/backend_->poisons());
  }
  void fill(SavedId saved, const std::byte* from, Bytes bytes) override { saved_.fill(saved, from, bytes); }
  void release_saved(SavedId saved) override { saved_.release_saved(saved); }

 private:
  struct Hook {
    std::string name;
    std::vector<UnitId> needs;     // sorted
    std::uint64_t sequence = 0;    // autograd's counter when its forward began
    bool inner_was_first = false;  // an output of an inner module announced its backward first
  };
  struct Parameter {
    BridgedParameter facts;
    UnitId unit;
    NodePtr accumulator;  // kept alive, because it has our hooks
    at::Tensor buffer;    // view of the unit's gradient storage
    std::vector<std::int64_t> sizes, strides;
    std::uint32_t version = 0;  // the variable's, when its unit was attached
    bool written = false;       // into the buffer that is open now
    bool arrived = false;       // in this backward
    bool take_after = false;    // AccumulateGrad goes first, see Note [Gradients]
  };
  struct Armed {
    int task;
    std::shared_future<void> over;  // ready when autograd has let go of the backward
  };

  class WeightWrites;

  bool is_ours(const c10::Storage& storage) const;
  HeldGradient& held(std::size_t index) const { return (*shown_)[static_cast<int>(index)]; }
  bool has_held(std::size_t index) const { return shown_->has(static_cast<int>(index)); }
  void write_scales(const std::vector<int>& indices);
  /// Returns true if the value that the gradient is added to is in the buffer already.
  bool is_brought(int index) const;
  /// Called when the user is about to write a held gradient, which an update may still read.
  void gradient_is_written(UnitId unit);
  void announce_forward(HookId hook);
  void announce(HookId hook, Phase phase, bool recomputes = false);
  void reset();
  void hook_outputs(HookId hook, const std::vector<at::Tensor>& outputs, bool inner);
  void raise_lost_writes();
  void check_parameter_storage(const Hook& hook);
  void refuse_foreign_hooks(const Parameter& checked) const;
  void arm();
  void task_ended(int task);
  void finish_backward();
  bool adds_to_held(int index) const;
  void refuse_unreduced() const;
  void note_sums();
  void multiply_parts();
  void share_arrivals();
  /// Returns checksums of this rank's steps, which ranks compare.
  std::vector<std::int64_t> steps() const;
  static void refuse_other_steps(const std::vector<std::int64_t>& first, const std::vector<std::int64_t>& its,
                                 std::size_t rank);
  void refuse_other_reductions(const std::vector<std::int64_t>& first, const std::vector<std::int64_t>& its,
                               std::size_t rank) const;
  void write_gradient(int index, const at::Tensor& gradient);
  void refuse_captured_gradients() const;
  [[noreturn]] static void refuse_foreign(const Parameter& refused);
  void drop_cleared_gradients();
  void check_gradients_to_update();
  void refuse_open_home() const;
  void refuse_other_process() const;
  void make_accumulators();
  void refuse_other_addresses(std::byte* held) const;
  bool is_in_place(int index) const;
  void await_failed_backward();
  void forget_failed_backward();
  /// Returns true if the user's loop sees the held gradient in p.grad, and may edit it.
  bool shows_gradients() const { return !updates_in_backward_ && !is_shared_; }
  Parameter& parameter(int index) { return parameters_[static_cast<std::size_t>(index)]; }
  const Parameter& parameter(int index) const { return parameters_[static_cast<std::size_t>(index)]; }

  const c10::Device device_;
  Signature forward_;                         // of the forward pass that began last
  const int process_;                         // a forked child has the memory, but not the threads
  const std::shared_ptr<TorchBridge*> self_;  // held by hooks; emptied when this object closes
  std::vector<Parameter> parameters_;
  std::vector<std::vector<int>> parameters_of_;  // by unit
  Stream accumulators_stream_ = nullptr;         // the stream that the accumulators were made on
  std::vector<std::unique_ptr<UnitStorage>> weights_;
  std::vector<std::unique_ptr<UnitStorage>> gradients_;  // null: frozen
  std::shared_ptr<ShownGradients> shown_;                // by parameter
  std::shared_ptr<Listener> weight_writes_;              // by unit
  const std::shared_ptr<Backend> backend_;
  std::vector<std::byte*> homes_;  // by unit: the device's address of the working copy
  std::vector<bool> is_staged_;    // by unit: the device cannot address the working copy
  std::vector<std::string> names_;
  std::vector<Hook> hooks_;
  HookId first_alone_;           // the module that began the open pass, if no root did
  std::vector<HookId> entered_;  // modules that are entered and not left, innermost last
  bool alone_ = false;           // a part of the model was called by itself, and began the pass
  std::vector<Armed> armed_;     // backwards that have begun and not ended
  std::thread::id trains_;       // the thread of the last forward
  std::vector<UnitId> home_open_;
  std::vector<std::string> lost_writes_;  // changed in place on the device, not yet reported
  std::vector<int> comparisons_left_;     // by unit, see `evict`
  std::optional<Signature> interrupted_;  // the forward that a backward inside a module has ended
  std::function<void(UnitId)> run_update_;
  std::function<void()> begin_backward_;
  Parts parts_;
  MoreHome more_home_;
  SavedTensors saved_;
  const bool updates_in_backward_;
  const bool is_shared_;  // ranks share the model: each has a part of every unit
  // Checksums over all steps: which parameters were updated, and with which hyperparameters. The order does not count.
  std::uint64_t updated_ = 0, hyperparameters_ = 0;
  ParameterSet adds_to_;  // parameters with sums of earlier backwards, to which the open one adds
  bool accumulates_ = false;
  bool is_told_ = false;       // a schedule tells: engine/drafts.h, Note [Last gradients]
  bool are_any_last_ = false;  // then: of any unit
  bool unsynced_ = false;
  Engine engine_;  // last: it calls back into everything above
};

}  // namespace noria
