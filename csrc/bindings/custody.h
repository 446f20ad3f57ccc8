// The parameters of a wrapped model hand their storage over to this object, and it tells the engine what autograd does.
//
// It translates and nothing more: module hooks and autograd hooks come in, engine verbs go out; the engine says where a
// unit's bytes are, storages are pointed there. Ownership: owns the unit storages, the gradient views and the engine;
// keeps the parameters and their AccumulateGrad nodes alive. Threads: hooks of one model run one at a time (the
// launching thread, or autograd's thread for the device while the launching thread waits in `backward`). Public members
// are called without the GIL; only `run_update` takes it.
//
// Note [Gradients]. A gradient is caught before AccumulateGrad sees it, written into the unit's gradient buffer on the
// compute stream, and AccumulateGrad is given nothing; `p.grad` is put in place when the outermost backward ends. Two
// cases are left to AccumulateGrad: a parameter with post-accumulate hooks of the user's (they must see `p.grad`; what
// it then holds is taken), and a `p.grad` that the user put there (it accumulates in place, as in torch).
//
// Note [Graph tasks]. Engine::queue_callback runs once per graph task and not after an exception, so the end of a
// backward is: the callback of a task that is not nested, or of a nested one when no other is armed. A task that died
// is known by its token, which dies with it.
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

/// One parameter of a unit. `gradient_offset` -1: frozen when it was wrapped.
struct CustodyParameter {
  at::Tensor variable;
  std::string name;
  at::ScalarType dtype = at::kFloat;  // of the working copy
  std::int64_t offset = 0;            // bytes, in the unit's working copy
  std::int64_t gradient_offset = -1;  // bytes, in the unit's gradient layout
  float* scales = nullptr;            // in the home: what its gradient is multiplied by late; null: nothing ever

  Bytes bytes() const { return {variable.numel() * variable.element_size()}; }
};

struct CustodyUnit {
  EngineUnit engine;
  std::vector<CustodyParameter> parameters;
};

enum class GradientIs { none, held, foreign };

class Custody final : public Custodian, public Living<Custody> {
 public:
  Custody(EngineOptions options, std::shared_ptr<Backend> backend, std::vector<CustodyUnit> units, BufferTable buffers,
          std::shared_ptr<HostOptimizer> optimizer, c10::Device device, const std::shared_ptr<void>& held_home,
          Bytes least_saved);
  ~Custody() override;

  Engine& engine() { return engine_; }
  /// Called when an outermost backward begins that will update (update="backward").
  void set_backward_callback(std::function<void()> begin) { begin_backward_ = std::move(begin); }
  void set_update_callback(std::function<void(UnitId)> run_update) { run_update_ = std::move(run_update); }

  // ---- hooks ----
  HookId add_hook(std::string name, std::vector<UnitId> needs);

  void begin_forward(std::int32_t root, bool training, bool grad_enabled);
  void end_forward(const std::vector<at::Tensor>& outputs);
  void enter(HookId hook);
  /// Ends the module's visit and hooks the backward of its outputs.
  void leave(HookId hook, const std::vector<at::Tensor>& outputs);
  /// A module inside of the hook's returned these: should their backward come before that of the hook's own outputs
  /// (a loss on an inner tensor), it announces the visit.
  void inner_outputs(HookId hook, const std::vector<at::Tensor>& outputs);
  bool inner_was_first(HookId hook) const { return hooks_[static_cast<std::size_t>(hook.value)].inner_was_first; }
  /// An operator outside of any module that has a hook is about to use these units, and has returned `outputs`.
  void visit_for_operator(HookId hook);
  /// Forgets a backward that raised, if there is one.
  void recover();
  /// Forgets a forward that raised, if there is one.
  void abandon_forward();

  // ---- autograd, through grad_hooks.cpp ----
  /// A node that `inner` has hooked already needs no announcement by `outer`, which lacks what `inner` needs: units
  /// that `outer` uses itself are needed by other nodes.
  bool is_announced_by(HookId outer, HookId inner) const;
  void backward_begins(HookId hook, bool inner);  // hook -1: the outermost module's output
  torch::autograd::variable_list catch_gradient(int index, const torch::autograd::variable_list& gradients);
  void after_accumulate(int index);

  // ---- saved tensors ----
  using MoreHome = std::function<std::pair<std::byte*, Bytes>(Bytes)>;
  void set_saved_callback(MoreHome more_home) { more_home_ = std::move(more_home); }
  /// As the hooks of torch.autograd.graph.saved_tensors_hooks.
  std::shared_ptr<SavedTensor> pack(const at::Tensor& tensor) { return saved_.pack(engine_, tensor); }
  at::Tensor unpack(const SavedTensor& saved) { return saved_.unpack(engine_, saved, current_stream()); }

  // ---- the optimizer ----
  GradientIs gradient_is(int index) const;
  /// Copies a gradient that the user put into `p.grad` into the held one.
  void take_foreign_gradient(int index);
  void begin_step();
  /// Where updates find what the gradient is multiplied by, and how many factors; once `begin_step` has been called.
  std::pair<const float*, int> late_scales(int index) const;
  /// The same factors, for an update that multiplies what the home holds: the gradient's bytes have them then.
  std::vector<float> take_scales(int index);
  /// The factors as numbers, asked of the device.
  std::vector<float> scale_values(int index) const;
  void drop_scales(int index);
  /// The first of these gradients that has been multiplied by anything but exactly 1; -1: none.
  int first_scaled(const std::vector<int>& indices) const;
  /// The gradient's bytes are its value from now on, and will be written: nothing that is known of them holds. True:
  /// the device multiplies them when its stream gets there, and the host must not read or write them before.
  bool apply_scales(int index);
  /// Of gradients that a step has used, times what unscales them: they count as unscaled.
  void unscale_used(const std::vector<int>& indices, const at::Tensor& inverse);
  /// Where ranks share the gradients.
  struct Parts {
    std::function<std::vector<at::Tensor>(const std::vector<int>&, const NormAsked&)> norms;
    std::function<void(int)> multiply;  // what this rank holds, by the gradient's scales, which are dropped
  };
  void set_parts(Parts parts) { parts_ = std::move(parts); }
  /// From now on passes accumulate, or no longer do (update="backward").
  void set_accumulating(bool accumulating);
  /// As the engine's. Until the next call `step` need not come between passes.
  void set_last_of(const std::optional<std::vector<UnitId>>& units);
  void hold_all(const std::vector<std::byte*>& held) { engine_.hold_all(held, current_stream()); }
  void hold_unsummed(const std::vector<std::byte*>& memory) { engine_.hold_unsummed(memory, current_stream()); }
  /// From now on gradients stay this rank's own, or are summed over all ranks.
  void set_unsynced(bool unsynced);
  bool is_held_back(int index) const;
  /// `step` after passes that have only accumulated: updates with what the user has not cleared since.
  void update_held();
  void refuse_unclaimed(const std::string& found) const;
  std::vector<std::vector<double>> sum_gradients(std::vector<std::pair<UnitId, UpdateJob>> jobs);
  /// After the updates were issued: the first write to a held gradient waits for them.
  void guard_gradients();

  // ---- the home ----
  /// Parameters of these units show the home; or `shown`, for each of them, where what is at home is not the whole:
  /// then the caller fills it, and takes from it what has changed.
  void open_home(const std::vector<UnitId>& units, const std::vector<std::byte*>& shown, bool write);
  void close_home(const std::vector<UnitId>& units, bool write);
  /// While the home is open: somebody has asked for write access to the unit's parameters.
  bool is_written(UnitId unit) const { return weights_[static_cast<std::size_t>(unit.value)]->written(); }
  /// While the home is open: parameters that were given other data (`p.data = x`) are given it in the home. Names two
  /// that were given the same memory; each has its own then.
  std::string bring_home();
  /// Puts a parameter's storage back where it belongs; false when it was there.
  bool rejoin(int index);
  /// The parameter leaves for good and becomes `replacement`.
  void release(int index, const at::Tensor& replacement);
  void close();
  /// Autograd's own "modified by an inplace operation" for graphs that are older than the update.
  void bump_versions(const std::vector<int>& indices);
  /// A step updates these parameters; `hyperparameters`: a checksum. Ranks that share the model compare all steps, at
  /// the end of each backward that sums.
  void note_step(const std::vector<int>& updated, std::uint32_t hyperparameters);
  /// Everybody's numbers, by rank, for what all ranks do together; as many from each. What they have done alone until
  /// now, they must have done alike.
  std::vector<std::int64_t> exchange(std::vector<std::int64_t> numbers);
  Stream current_stream() const;

  // ---- Custodian ----
  void attach(UnitId unit, std::byte* weights) override;
  void evict(UnitId unit) override;
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
  void left(SavedId saved) override { saved_.left(saved); }

 private:
  struct Hook {
    std::string name;
    std::vector<UnitId> needs;     // sorted
    std::uint64_t sequence = 0;    // autograd's counter when its forward began
    bool inner_was_first = false;  // its backward was first announced by an output of an inner module
  };
  struct Parameter {
    CustodyParameter facts;
    UnitId unit;
    NodePtr accumulator;  // kept alive: its hooks are ours
    at::Tensor buffer;    // view of the unit's gradient storage
    std::vector<std::int64_t> sizes, strides;
    std::uint32_t version = 0;  // when its unit was attached
    bool written = false;       // in the buffer that is open now
    bool arrived = false;       // in this backward
    bool take_after = false;    // AccumulateGrad goes first, see the Note
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
  /// What the gradient is added to lies in its buffer.
  bool is_brought(int index) const;
  /// The user is about to write a held gradient that an update may still read.
  void gradient_is_written(UnitId unit);
  void announce_forward(HookId hook);
  void announce(HookId hook, Phase phase, bool recomputes = false);
  void reset();
  void hook_outputs(HookId hook, const std::vector<at::Tensor>& outputs, bool inner);
  void raise_lost_writes();
  void check_in_custody(const Hook& hook);
  void refuse_foreign_hooks(const Parameter& checked) const;
  void arm();
  void task_ended(int task);
  void finish_backward();
  bool adds_to_held(int index) const;
  void refuse_unsummed() const;
  void note_sums();
  void multiply_parts();
  void share_arrivals();
  /// What this rank's steps have been: to be compared.
  std::vector<std::int64_t> steps() const;
  static void refuse_other_steps(const std::vector<std::int64_t>& first, const std::vector<std::int64_t>& its,
                                 std::size_t rank);
  void refuse_other_sums(const std::vector<std::int64_t>& first, const std::vector<std::int64_t>& its,
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
  /// The user's loop sees in p.grad what is held, and may edit it.
  bool shows_gradients() const { return !updates_in_backward_ && !is_shared_; }
  Parameter& parameter(int index) { return parameters_[static_cast<std::size_t>(index)]; }
  const Parameter& parameter(int index) const { return parameters_[static_cast<std::size_t>(index)]; }

  const c10::Device device_;
  Signature forward_;                     // of the forward pass that began last
  const int process_;                     // a forked child has the memory, but not the threads
  const std::shared_ptr<Custody*> self_;  // what hooks hold; emptied when this object closes
  std::vector<Parameter> parameters_;
  std::vector<std::vector<int>> parameters_of_;  // by unit
  Stream accumulators_stream_ = nullptr;         // that they were made on
  std::vector<std::unique_ptr<UnitStorage>> weights_;
  std::vector<std::unique_ptr<UnitStorage>> gradients_;  // null: frozen
  std::shared_ptr<ShownGradients> shown_;                // by parameter
  std::shared_ptr<Listener> weight_writes_;              // by unit
  const std::shared_ptr<Backend> backend_;
  std::vector<std::byte*> homes_;  // by unit, as the device addresses them
  std::vector<bool> is_staged_;    // by unit: the device cannot address it
  std::vector<std::string> names_;
  std::vector<Hook> hooks_;
  HookId first_alone_;           // began the pass that is open, if no root did
  std::vector<HookId> entered_;  // modules that have been entered and not left, innermost last
  bool alone_ = false;           // the pass began with a part of the model that was called by itself
  std::vector<Armed> armed_;     // backwards that have begun and not ended
  std::thread::id trains_;       // which thread's forward came last
  std::vector<UnitId> home_open_;
  std::vector<std::string> lost_writes_;  // changed in place while on the device, not yet complained of
  std::vector<int> comparisons_left_;     // by unit, see `evict`
  std::optional<Signature> interrupted_;  // the forward that a backward inside of a module has ended
  std::function<void(UnitId)> run_update_;
  std::function<void()> begin_backward_;
  Parts parts_;
  MoreHome more_home_;
  SavedTensors saved_;
  const bool updates_in_backward_;
  const bool is_shared_;  // by ranks: each has a part of every unit
  // Of all steps, in sums that do not depend on their order: checksums of what was updated, and by what.
  std::uint64_t updated_ = 0, hyperparameters_ = 0;
  ParameterSet adds_to_;  // what the open backward adds to: sums of earlier ones
  bool accumulates_ = false;
  bool is_told_ = false;       // which gradients are the last ones: see Engine, Note [Last gradients]
  bool are_any_last_ = false;  // then
  bool unsynced_ = false;
  Engine engine_;  // last: it calls back into everything above
};

}  // namespace noria
