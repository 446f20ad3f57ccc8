#include "bindings/torch_bridge.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/add.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <set>

#include "base/errors.h"
#include "bindings/grad_hooks.h"
#include "bindings/python_errors.h"

namespace noria {

using torch::autograd::variable_list;

namespace {

std::vector<EngineUnit> engine_units(const std::vector<BridgedUnit>& units) {
  std::vector<EngineUnit> result;
  for (const BridgedUnit& unit : units) result.push_back(unit.engine);
  return result;
}

std::string evicted_message(const std::string& unit, bool is_shared) {
  return usage_text(
      "unit \"" + unit + "\" on the device", "it evicted (unit " + unit + " is evicted: use noria.materialize)",
      std::string("read and edit parameters inside `with noria.materialize(model):`") +
          (is_shared ? ", which all ranks enter" : "") +
          "; if the model itself uses it outside of its module, or only in some passes, wrap with check=\"operators\"");
}

std::string ended_message(const std::string& unit) {
  return usage_text("a backward before noria.unwrap, or the end of the model",
                    "one that needs weights of unit \"" + unit + "\", which have left the device",
                    "call backward() first, or run the forward again");
}

// Limits how often a unit's bytes are compared with the home's if it is only known that they may have been written. It
// applies to devices where the caller waits for a comparison. torch's own operators report their writes.
constexpr int kMostComparisons = 2;

constexpr const char* kWhyDead =
    "noria expected no look at p.grad under update=\"backward\", which uses it up or keeps it for step(), but found "
    "one (a clip, a scaler, a logger, zero_grad(set_to_none=False)). Remedy: wrap with update=\"auto\", where p.grad "
    "is as in torch";

constexpr const char* kWhyShared =
    "noria expected no look at p.grad where ranks share the model and each has a part of the sum, but found one (a "
    "clip, a scaler, a logger, zero_grad(set_to_none=False), a pipeline's scale_grads). Remedy: clip with "
    "optimizer.clip_grad_norm_ or wrap with max_grad_norm; give noria.wrap a pipeline's stage in place of its module, "
    "whose gradients it scales";

constexpr const char* kWhyDeadAndShared =
    "noria expected no look at p.grad under update=\"backward\", which uses it up, where ranks share the model, but "
    "found one (a clip, a scaler, a logger, zero_grad(set_to_none=False)). Remedy: to clip, wrap with update=\"auto\" "
    "and max_grad_norm; to accumulate, use optimizer.accumulate()";

const char* why_unseen(bool is_dead, bool is_shared) {
  if (is_dead && is_shared) return kWhyDeadAndShared;
  return is_shared ? kWhyShared : (is_dead ? kWhyDead : "");
}

bool in_backward() { return torch::autograd::get_current_graph_task_id() >= 0; }

}  // namespace

/// Hears operators that write weights on the device. They may bypass version counters and storages.
class TorchBridge::WeightWrites final : public Listener {
 public:
  explicit WeightWrites(std::shared_ptr<TorchBridge*> bridge) : bridge_(std::move(bridge)) {}

  void before_write(int unit) override {
    if (*bridge_ != nullptr) (*bridge_)->weights_[static_cast<std::size_t>(unit)]->note_write();
  }

 private:
  const std::shared_ptr<TorchBridge*> bridge_;
};

TorchBridge::TorchBridge(EngineOptions options, std::shared_ptr<Backend> backend, std::vector<BridgedUnit> units,
                         BufferTable buffers, std::shared_ptr<HostOptimizer> optimizer, c10::Device device,
                         const std::shared_ptr<void>& held_home, Bytes least_saved)
    : device_(device),
      process_(getpid()),
      self_(std::make_shared<TorchBridge*>(this)),
      backend_(backend),
      saved_(
          device, least_saved, [this](const c10::Storage& storage) { return is_ours(storage); },
          [this](const c10::Storage& storage) {
            return std::any_of(weights_.begin(), weights_.end(),
                               [&](const auto& each) { return each->attached() && each->is(storage); });
          }),
      updates_in_backward_(options.ring.has_value()),
      is_shared_(options.lane != nullptr),
      adds_to_(0),
      engine_(options, backend, engine_units(units), std::move(buffers), *this, std::move(optimizer)) {
  ShownGradients::Callbacks callbacks;
  callbacks.before_write = [this](int index) { gradient_is_written(parameter(index).unit); };
  callbacks.before_scale = [this](int index) { engine_.run_deferred(parameter(index).unit); };
  callbacks.is_settled = [this](int index) {
    if (getpid() != process_) return false;  // a write raises the error
    const Parameter& asked = parameter(index);
    const bool is_reduced =
        !is_shared_ || !engine_.is_unreduced(asked.unit, Bytes{asked.facts.gradient_offset}, asked.facts.bytes());
    return is_reduced && engine_.phase() != Phase::backward;
  };
  if (is_shared_) {
    callbacks.norms_of_parts = [this](const std::vector<int>& indices, const NormAsked& asked) {
      return parts_.norms ? parts_.norms(indices, asked) : std::vector<at::Tensor>(indices.size());
    };
  }
  shown_ = std::make_shared<ShownGradients>(std::move(callbacks));
  weight_writes_ = std::make_shared<WeightWrites>(self_);
  if (is_shared_) {
    for (const BridgedUnit& unit : units) refuse_other_addresses(unit.engine.held);
  }
  for (std::size_t u = 0; u < units.size(); ++u) {
    const EngineUnit& engine = units[u].engine;
    names_.push_back(engine.facts.name);
    const bool is_whole = engine.working != nullptr && !is_shared_;
    homes_.push_back(is_whole ? backend->device_address(engine.working) : nullptr);
    is_staged_.push_back(is_whole && homes_.back() == nullptr);
    weights_.push_back(
        std::make_unique<UnitStorage>(engine.facts.weights.count, device, evicted_message(names_.back(), is_shared_)));
    listen(weights_.back()->storage(), weight_writes_, static_cast<int>(u));
    gradients_.push_back(engine.facts.gradients == Bytes{0}
                             ? nullptr
                             : std::make_unique<UnitStorage>(engine.facts.gradients.count, device,
                                                             "gradient buffer of " + names_.back() + " is closed"));
    parameters_of_.emplace_back();
    comparisons_left_.push_back(device.is_cpu() ? std::numeric_limits<int>::max() : kMostComparisons);
    for (BridgedParameter& facts : units[u].parameters) {
      const int index = static_cast<int>(parameters_.size());
      parameters_of_.back().push_back(index);
      Parameter parameter;
      parameter.unit = UnitId(static_cast<std::int32_t>(u));
      const at::Tensor& variable = facts.variable;
      parameter.sizes = variable.sizes().vec();
      parameter.strides = variable.strides().vec();
      variable.set_data(
          weights_.back()->view(facts.dtype, facts.offset, variable.sizes(), variable.strides(), written_keys()));
      std::unique_ptr<HeldGradient> held;
      if (facts.gradient_offset >= 0) {
        parameter.buffer =
            gradients_.back()->view(facts.dtype, facts.gradient_offset, variable.sizes(), variable.strides());
        const bool is_seen = engine.held != nullptr && !is_shared_;
        std::byte* const memory = is_seen ? backend->device_address(engine.held + facts.gradient_offset) : nullptr;
        held = std::make_unique<HeldGradient>(
            memory, facts.bytes().count, device, variable,
            // Keeps the home, because a gradient that the user kept outlives this object.
            [self = self_, index, held_home] {
              if (*self == nullptr) return;
              as_python_errors([&] { (*self)->shown_->before_raw_write(index); });
            },
            why_unseen(updates_in_backward_, is_shared_));
      }
      parameter.facts = std::move(facts);
      parameters_.push_back(std::move(parameter));
      shown_->add(std::move(held));
    }
  }
}

bool TorchBridge::is_ours(const c10::Storage& storage) const {
  const auto has = [&](const auto& each) { return each && each->is(storage); };
  return std::any_of(weights_.begin(), weights_.end(), has) || std::any_of(gradients_.begin(), gradients_.end(), has);
}

TorchBridge::~TorchBridge() {
  *self_ = nullptr;
  for (const auto& weights : weights_) stop_listening(weights->storage());
}

Stream TorchBridge::current_stream() const {
  if (device_.is_cpu()) return nullptr;
  const c10::impl::VirtualGuardImpl guard(device_.type());
  void* handle = guard.getStream(device_).native_handle();
  return handle != nullptr ? handle : kDefaultStream;
}

// ---- module hooks -----------------------------------------------------------------------------------------------

HookId TorchBridge::add_hook(std::string name, std::vector<UnitId> needs) {
  std::sort(needs.begin(), needs.end());
  hooks_.push_back({std::move(name), std::move(needs), 0, false});
  return HookId(static_cast<std::int32_t>(hooks_.size()) - 1);
}

void TorchBridge::begin_forward(std::int32_t root, bool training, bool grad_enabled) {
  refuse_open_home();
  if (backend_->is_captured(current_stream())) {
    throw UsageError("a forward outside of torch.cuda.graph",
                     "one that is captured: a graph would replay the addresses of weights that move",
                     "train without CUDA graphs, or capture a model that is not wrapped");
  }
  forget_failed_backward();
  trains_ = std::this_thread::get_id();
  if (!is_told_) refuse_unclaimed("a forward");
  // Makes the nodes here, on the training stream, so that autograd finds producer and consumer on one stream.
  if (grad_enabled) make_accumulators();
  first_alone_ = HookId();
  entered_.clear();
  Signature signature;
  signature.phase = Phase::forward;
  signature.root = root;
  alone_ = root < 0;
  signature.training = training;
  signature.grad_enabled = grad_enabled;
  forward_ = signature;
  saved_.forget_dropped(engine_);  // of a forward that had no backward
  engine_.begin_pass(signature, current_stream());
}

void TorchBridge::end_forward(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad() && output.grad_fn()) hook_backward(output, self_, -1, /*inner=*/false);
  }
  entered_.clear();
  if (engine_.phase() == Phase::forward) engine_.end_pass(current_stream());
  raise_lost_writes();
}

void TorchBridge::enter(HookId id) {
  raise_lost_writes();
  hooks_[static_cast<std::size_t>(id.value)].sequence = at::sequence_number::peek();
  if (in_backward()) {
    arm();  // a recomputation
  } else if (!engine_.phase() || (entered_.empty() && id == first_alone_)) {
    // A part of the model is called by itself. That is a pass of its own. It lasts until the same part is called again,
    // or a whole model is.
    const bool with_grad = at::GradMode::is_enabled();
    begin_forward(-1, /*training=*/with_grad, with_grad);
    first_alone_ = id;
  }
  entered_.push_back(id);
  announce_forward(id);
}

void TorchBridge::leave(HookId id, const std::vector<at::Tensor>& outputs) {
  hook_outputs(id, outputs, /*inner=*/false);
  // A recomputation may have stopped early and left modules entered. Those inside this one are gone too.
  const auto found = std::find(entered_.rbegin(), entered_.rend(), id);
  if (found != entered_.rend()) entered_.erase(std::prev(found.base()), entered_.end());
  if (!entered_.empty()) {
    announce_forward(entered_.back());
  } else if (!in_backward()) {
    engine_.leave(current_stream());
  }
  raise_lost_writes();
}

void TorchBridge::inner_outputs(HookId id, const std::vector<at::Tensor>& outputs) {
  hook_outputs(id, outputs, /*inner=*/true);
}

void TorchBridge::visit_for_operator(HookId id) {
  hooks_[static_cast<std::size_t>(id.value)].sequence = at::sequence_number::peek();
  announce(id, Phase::forward);
}

void TorchBridge::hook_outputs(HookId id, const std::vector<at::Tensor>& outputs, bool inner) {
  if (!at::GradMode::is_enabled()) return;
  const std::uint64_t sequence = hooks_[static_cast<std::size_t>(id.value)].sequence;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    // A node older than this forward belongs to another unit: the module only passed the output through.
    const auto announce_by = [&](const at::Tensor& tensor) {
      const auto& node = tensor.grad_fn();
      if (node && node->sequence_nr() >= sequence) hook_backward(tensor, self_, id.value, inner);
    };
    announce_by(output);
    // An operator that changes a view in place bypasses the view's own node. It uses the node of the view's base.
    if (output.is_view()) announce_by(at::Tensor(output._base()));
  }
}

bool TorchBridge::is_announced_by(HookId outer, HookId inner) const {
  if (!outer.valid() || !inner.valid() || outer == inner) return false;
  const auto& outer_needs = hooks_[static_cast<std::size_t>(outer.value)].needs;
  const auto& inner_needs = hooks_[static_cast<std::size_t>(inner.value)].needs;
  return !std::includes(outer_needs.begin(), outer_needs.end(), inner_needs.begin(), inner_needs.end());
}

// Called in a forward, also in one inside a backward (a recomputation).
void TorchBridge::announce_forward(HookId id) {
  const bool recomputes = in_backward();
  announce(id, recomputes ? Phase::backward : Phase::forward, recomputes);
}

void TorchBridge::announce(HookId id, Phase phase, bool recomputes) {
  const Hook& hook = hooks_[static_cast<std::size_t>(id.value)];
  check_parameter_storage(hook);
  saved_.forget_dropped(engine_);  // leftovers of the last visit must not block this one
  engine_.announce(id, hook.needs, phase, current_stream(), recomputes);
}

void TorchBridge::check_parameter_storage(const Hook& hook) {
  for (UnitId unit : hook.needs) {
    for (int index : parameters_of_[static_cast<std::size_t>(unit.value)]) {
      Parameter& checked = parameter(index);
      const bool unfrozen = checked.facts.gradient_offset < 0 && checked.facts.variable.requires_grad();
      if (unfrozen) {
        throw UsageError("parameter \"" + checked.facts.name + "\" frozen, as it was when the model was wrapped",
                         "requires_grad=True", "unfreeze parameters before noria.wrap, or unwrap and wrap again");
      }
      if (rejoin(index)) {
        throw UsageError("parameter \"" + checked.facts.name + "\" where noria.wrap put it",
                         "its data replaced (by .to(), .half(), load_state_dict(assign=True) or p.data = ...); the "
                         "home's values were kept",
                         "change dtypes before noria.wrap, and values inside `with noria.materialize(model):`");
      }
    }
  }
}

bool TorchBridge::is_in_place(int index) const {
  const Parameter& asked = parameter(index);
  const at::Tensor& variable = asked.facts.variable;
  return weights_[static_cast<std::size_t>(asked.unit.value)]->holds(variable) &&
         variable.scalar_type() == asked.facts.dtype && variable.sizes() == asked.sizes &&
         variable.strides() == asked.strides &&
         variable.storage_offset() * static_cast<std::int64_t>(variable.itemsize()) == asked.facts.offset;
}

bool TorchBridge::rejoin(int index) {
  if (is_in_place(index)) return false;
  const Parameter& strayed = parameter(index);
  const UnitStorage& storage = *weights_[static_cast<std::size_t>(strayed.unit.value)];
  const at::Tensor& variable = strayed.facts.variable;
  variable.set_data(
      storage.view(strayed.facts.dtype, strayed.facts.offset, strayed.sizes, strayed.strides, written_keys()));
  return true;
}

void TorchBridge::release(int index, const at::Tensor& replacement) {
  parameter(index).facts.variable.set_data(replacement);
}

void TorchBridge::recover() {
  await_failed_backward();
  if (engine_.phase() == Phase::backward) reset();
}

void TorchBridge::abandon_forward() {
  if (engine_.phase() == Phase::forward) reset();
}

void TorchBridge::reset() {
  armed_.clear();
  entered_.clear();
  interrupted_.reset();
  for (Parameter& each : parameters_) each.written = each.arrived = each.take_after = false;
  engine_.reset(current_stream());
}

// ---- backward ---------------------------------------------------------------------------------------------------

void TorchBridge::make_accumulators() {
  const Stream stream = current_stream();
  // A node waits at every gradient for the stream that it was made on, and torch warns. So a new stream needs new
  // nodes.
  const bool is_elsewhere = std::exchange(accumulators_stream_, stream) != stream;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& each = parameters_[i];
    if (each.facts.gradient_offset < 0 || !each.facts.variable.requires_grad()) continue;
    if (is_elsewhere) each.accumulator.reset();
    NodePtr node = torch::autograd::impl::grad_accumulator(each.facts.variable);
    if (node == each.accumulator) continue;  // else: new, or torch made another after a change of dtype
    hook_accumulator(*node, self_, static_cast<int>(i));
    each.accumulator = std::move(node);
    refuse_foreign_hooks(each);
  }
}

void TorchBridge::refuse_foreign_hooks(const Parameter& checked) const {
  if (!has_foreign_hooks(*checked.accumulator)) return;
  throw UsageError("no hooks on the AccumulateGrad node of \"" + checked.facts.name + "\" but noria's",
                   "others, as DistributedDataParallel and its kin register them",
                   "use parameter.register_hook or register_post_accumulate_grad_hook; wrap the model itself and not "
                   "under DistributedDataParallel");
}

void TorchBridge::backward_begins(HookId hook, bool inner) {
  if (at::GradMode::is_enabled()) {
    throw UsageError("backward() without create_graph",
                     "create_graph=True, whose second backward would need weights that have left the device",
                     "compute higher derivatives on an unwrapped model");
  }
  raise_lost_writes();
  arm();
  if (!hook.valid()) return;
  Hook& announced = hooks_[static_cast<std::size_t>(hook.value)];
  announced.inner_was_first |= inner && !engine_.is_visited(announced.needs);
  announce(hook, Phase::backward);
}

void TorchBridge::arm() {
  const int task = torch::autograd::get_current_graph_task_id();
  for (const Armed& each : armed_) {
    if (each.task == task) return;
  }
  refuse_other_process();
  refuse_open_home();
  refuse_captured_gradients();
  forget_failed_backward();
  const auto token = std::make_shared<std::promise<void>>();  // never set: only its destruction counts
  armed_.push_back({task, token->get_future().share()});
  torch::autograd::Engine::get_default_engine().queue_callback([this, self = self_, task, token] {
    if (*self != nullptr) as_python_errors([&] { task_ended(task); });
  });
  if (engine_.phase() == Phase::backward) return;
  if (engine_.phase() == Phase::forward && !entered_.empty()) interrupted_ = forward_;
  alone_ = false;
  Signature signature;
  signature.phase = Phase::backward;
  signature.forward = engine_.last_forward();
  if (updates_in_backward_) check_gradients_to_update();
  else if (is_shared_) drop_cleared_gradients();
  if (is_shared_) note_sums();
  if (is_shared_) multiply_parts();
  for (std::size_t i = 0; i < parameters_.size() && !signature.accumulating; ++i) {
    signature.accumulating = gradient_is(static_cast<int>(i)) == GradientIs::held;
  }
  engine_.begin_pass(signature, current_stream());
  shown_->begin_backward(engine_.drafts()->expects_step());
  // If this backward raises, drains may still be on their way when the user edits held gradients.
  if (signature.accumulating && shows_gradients()) guard_gradients();
}

void TorchBridge::refuse_foreign(const Parameter& refused) {
  throw UsageError("no p.grad of the user's own where ranks share the model", "one on \"" + refused.facts.name + "\"",
                   "clear it: every rank updates its part of the gradient that backward() has reduced");
}

// Drops accumulated gradients that p.grad no longer shows: no update may use them.
void TorchBridge::drop_cleared_gradients() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& each = parameters_[i];
    if (each.facts.gradient_offset < 0) continue;
    const GradientIs is = gradient_is(static_cast<int>(i));
    if (is == GradientIs::none) {
      engine_.drop_gradient(each.unit, Bytes{each.facts.gradient_offset}, each.facts.bytes());
      if (has_held(i)) drop_scales(static_cast<int>(i));  // of a gradient that is gone
    }
    if (is != GradientIs::foreign) continue;
    if (is_shared_) refuse_foreign(each);
    throw UsageError("no p.grad of the user's own under update=\"backward\"", "one on \"" + each.facts.name + "\"",
                     "clear it, or wrap with update=\"auto\"");
  }
}

void TorchBridge::update_held() {
  drop_cleared_gradients();
  engine_.update_held(current_stream());
}

// Called before this backward has changed anything.
void TorchBridge::check_gradients_to_update() {
  if (!is_told_) refuse_unclaimed("another backward");
  drop_cleared_gradients();
  const std::vector<UnitId> updated = is_told_ ? engine_.unclaimed() : std::vector<UnitId>();  // of other stages
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (gradient_is(static_cast<int>(i)) != GradientIs::held || is_held_back(static_cast<int>(i))) continue;
    if (std::find(updated.begin(), updated.end(), parameters_[i].unit) != updated.end()) continue;
    throw UsageError("optimizer.zero_grad() between step() and the next backward()",
                     "the gradient of \"" + parameters_[i].facts.name + "\", which an update has used up, not cleared",
                     "call zero_grad(), or wrap with update=\"auto\", which accumulates over steps as torch does");
  }
  if (accumulates_ || (is_told_ && !are_any_last_) || !begin_backward_) return;
  engine_.backward_updates()->forget_expected();
  begin_backward_();
}

void TorchBridge::refuse_unclaimed(const std::string& found) const {
  // Torn units are refused elsewhere, with a reason of their own.
  if (!updates_in_backward_) return;
  const std::vector<UnitId> unclaimed = engine_.unclaimed();
  if (unclaimed.empty() || !engine_.torn().empty()) return;
  const std::string units =
      "\"" + names_[static_cast<std::size_t>(unclaimed.front().value)] + "\"" +
      (unclaimed.size() > 1 ? " and " + std::to_string(unclaimed.size() - 1) + " more units" : "");
  throw UsageError("optimizer.step() after each backward() under update=\"backward\", which has updated already",
                   found + " before the step() of the optimizer that holds " + units,
                   "call step() of every optimizer, or put a backward that shall only accumulate inside `with "
                   "optimizer.accumulate():`");
}

bool TorchBridge::is_held_back(int index) const {
  const Parameter& each = parameter(index);
  return each.facts.gradient_offset >= 0 && engine_.is_held_back(each.unit, Bytes{each.facts.gradient_offset});
}

void TorchBridge::set_accumulating(bool accumulating) {
  accumulates_ = accumulating;
  engine_.backward_updates()->set_accumulating(accumulating);
}

void TorchBridge::set_last_of(const std::optional<std::vector<UnitId>>& units) {
  is_told_ = units.has_value();
  are_any_last_ = units && !units->empty();
  engine_.drafts()->set_last_of(units);
}

// If the training thread has left a backward that has not ended, that backward raised. A thread of autograd's may still
// be in one of its nodes, and our hooks are on them.
void TorchBridge::await_failed_backward() {
  if (in_backward() || std::this_thread::get_id() != trains_) return;
  const std::vector<Armed> begun = armed_;  // a backward of another thread may end without having raised
  for (const Armed& each : begun) each.over.wait();
}

void TorchBridge::forget_failed_backward() {
  await_failed_backward();
  const auto is_over = [](const Armed& each) {
    return each.over.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  };
  if (std::any_of(armed_.begin(), armed_.end(), is_over)) reset();
}

void TorchBridge::refuse_captured_gradients() const {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr || wanted->empty()) return;
  for (const Parameter& each : parameters_) {
    if (!each.accumulator) continue;
    const auto found = wanted->find(&*each.accumulator);
    if (found == wanted->end() || !found->second.captures_ || found->second.captures_->empty()) continue;
    throw UsageError("gradients of wrapped parameters by loss.backward()",
                     "torch.autograd.grad with respect to \"" + each.facts.name + "\"",
                     "call loss.backward() and read p.grad, or unwrap the model first");
  }
}

void TorchBridge::task_ended(int task) {
  std::erase_if(armed_, [&](const Armed& each) { return each.task == task; });
  const bool nested = static_cast<bool>(torch::autograd::get_current_node());
  if (nested && !armed_.empty()) return;
  armed_.clear();
  finish_backward();
}

void TorchBridge::finish_backward() {
  if (!interrupted_) entered_.clear();
  if (is_shared_ && !unsynced_) {
    engine_.end_reductions(current_stream());
    share_arrivals();
  }
  saved_.forget_dropped(engine_);
  engine_.end_pass(current_stream());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& each = parameters_[i];
    if (!std::exchange(each.arrived, false)) continue;
    at::Tensor& gradient = each.facts.variable.mutable_grad();
    if (!gradient.defined()) gradient = held(i).tensor();
    if (shows_gradients() && gradient_is(static_cast<int>(i)) == GradientIs::held) held(i).guard();
  }
  if (const auto forward = std::exchange(interrupted_, std::nullopt)) {
    // torch.autograd.grad ran inside a module. The rest of the forward is a pass of its own.
    Signature rest = *forward;
    if (rest.root >= 0) rest.root = -2 - rest.root;
    engine_.begin_pass(rest, current_stream());
    announce(entered_.back(), Phase::forward);
  }
  raise_lost_writes();
}

bool TorchBridge::adds_to_held(int index) const {
  const Parameter& into = parameter(index);
  if (!is_shared_) return into.arrived || gradient_is(index) == GradientIs::held;
  return engine_.is_unreduced(into.unit, Bytes{into.facts.gradient_offset}, into.facts.bytes());
}

bool TorchBridge::is_brought(int index) const {
  const Parameter& into = parameter(index);
  return engine_.is_brought(into.unit, Bytes{into.facts.gradient_offset}, into.facts.bytes());
}

Ranges TorchBridge::held_gradients(UnitId unit) const {
  Ranges ranges;
  for (int index : parameters_of_[static_cast<std::size_t>(unit.value)]) {
    const auto slot = static_cast<std::size_t>(index);
    if (!has_held(slot) || !adds_to_held(index) || !held(slot).is_private()) continue;
    const BridgedParameter& facts = parameter(index).facts;
    ranges.add(Bytes{facts.gradient_offset}, Bytes{facts.gradient_offset} + facts.bytes());
  }
  return ranges;
}

void TorchBridge::set_unsynced(bool unsynced) {
  unsynced_ = unsynced;
  engine_.set_unsynced(unsynced);
}

void TorchBridge::refuse_unreduced() const {
  for (const Parameter& each : parameters_) {
    if (!is_shared_ || each.facts.gradient_offset < 0 ||
        gradient_is(static_cast<int>(&each - parameters_.data())) != GradientIs::held)
      continue;
    if (!engine_.is_unreduced(each.unit, Bytes{each.facts.gradient_offset}, each.facts.bytes())) continue;
    throw UsageError("a backward outside of no_sync() before optimizer.step()",
                     "gradients of \"" + each.facts.name + "\" that are not reduced over the ranks",
                     "leave no_sync() before the last backward of a step");
  }
}

void TorchBridge::note_step(const std::vector<int>& updated, std::uint32_t hyperparameters) {
  for (int index : updated) {
    std::uint64_t mixed = (static_cast<std::uint64_t>(index) + 1) * 0x9e3779b97f4a7c15;
    mixed = (mixed ^ (mixed >> 32)) * 0xbf58476d1ce4e5b9;
    updated_ += mixed ^ (mixed >> 29);
  }
  hyperparameters_ += hyperparameters;
}

// Multiplies held parts by their scales, because this backward adds to them.
void TorchBridge::multiply_parts() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const int index = static_cast<int>(i);
    if (!has_held(i) || held(i).scales().empty() || gradient_is(index) != GradientIs::held) continue;
    parts_.multiply(index);
  }
}

void TorchBridge::note_sums() {
  adds_to_ = ParameterSet(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& each = parameters_[i];
    if (each.facts.gradient_offset < 0) continue;
    if (engine_.is_reduced(each.unit, Bytes{each.facts.gradient_offset}, each.facts.bytes())) adds_to_.add(i);
  }
}

// A gradient that arrived on any rank counts as arrived on all ranks, also if its backward was not synced. Raises
// UsageError if the ranks have cleared gradients or stepped differently until now.
void TorchBridge::share_arrivals() {
  ParameterSet arrived(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool is_held =
        parameters_[i].facts.gradient_offset >= 0 && gradient_is(static_cast<int>(i)) == GradientIs::held;
    if (parameters_[i].arrived || is_held) arrived.add(i);
  }
  const auto num_words = static_cast<std::ptrdiff_t>(arrived.words().size());
  std::vector<std::int64_t> own = arrived.words();
  own.insert(own.end(), adds_to_.words().begin(), adds_to_.words().end());
  const std::vector<std::int64_t> own_steps = steps();
  own.insert(own.end(), own_steps.begin(), own_steps.end());
  const auto row = static_cast<std::ptrdiff_t>(own.size());
  const std::vector<std::int64_t> all = engine_.exchange(std::move(own), SyncPoint::backward);
  std::vector<std::int64_t> first;
  for (auto its = all.begin(); its != all.end(); its += row) {
    arrived.add_all({its, its + num_words});
    const std::vector<std::int64_t> done(its + num_words, its + row);
    if (its == all.begin()) first = done;
    const auto rank = static_cast<std::size_t>((its - all.begin()) / row);
    const auto steps_of = [&](const std::vector<std::int64_t>& of) { return std::vector(of.end() - 2, of.end()); };
    refuse_other_steps(steps_of(first), steps_of(done), rank);
    if (done != first) refuse_other_reductions(first, done, rank);
  }
  std::map<UnitId, std::set<Bytes>> came;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& each = parameters_[i];
    each.arrived = each.arrived || arrived.contains(i);
    if (each.arrived && each.facts.variable.numel() > 0) came[each.unit].insert(Bytes{each.facts.gradient_offset});
  }
  if (engine_.updates_in_backward()) engine_.backward_updates()->note_arrived(came);
}

std::vector<std::int64_t> TorchBridge::steps() const {
  return {static_cast<std::int64_t>(updated_), static_cast<std::int64_t>(hyperparameters_)};
}

std::vector<std::int64_t> TorchBridge::exchange(std::vector<std::int64_t> numbers) {
  const std::vector<std::int64_t> own = steps();
  numbers.insert(numbers.end(), own.begin(), own.end());
  const auto row = static_cast<std::ptrdiff_t>(numbers.size());
  const std::vector<std::int64_t> all = engine_.exchange(std::move(numbers), SyncPoint::other);
  std::vector<std::int64_t> gathered, first;
  for (auto its = all.begin(); its != all.end(); its += row) {
    const auto end = its + row - static_cast<std::ptrdiff_t>(own.size());
    gathered.insert(gathered.end(), its, end);
    const std::vector<std::int64_t> steps_of(end, its + row);
    if (its == all.begin()) first = steps_of;
    refuse_other_steps(first, steps_of, static_cast<std::size_t>((its - all.begin()) / row));
  }
  return gathered;
}

void TorchBridge::refuse_other_steps(const std::vector<std::int64_t>& first, const std::vector<std::int64_t>& its,
                                     std::size_t rank) {
  const std::string there = "on rank " + std::to_string(rank);
  const std::string start_again = "; these processes have parted: start again from a checkpoint of before";
  if (its[0] != first[0]) {
    throw UsageError("ranks that step as often, each time with gradients of the same parameters",
                     "steps since wrap that have updated other parameters on rank 0 than " + there,
                     "let all ranks call step() and zero_grad() alike, for the same parameters" + start_again);
  }
  if (its[1] != first[1]) {
    throw UsageError("the same hyperparameters on all ranks", "steps since wrap with others on rank 0 than " + there,
                     "give schedulers what all ranks have alike: a loss that is averaged over them" + start_again);
  }
}

void TorchBridge::refuse_other_reductions(const std::vector<std::int64_t>& first, const std::vector<std::int64_t>& its,
                                          std::size_t rank) const {
  const std::string there = "on rank " + std::to_string(rank);
  ParameterSet on_first(parameters_.size()), on_its(parameters_.size());
  on_first.add_all({first.begin(), first.end() - 2});
  on_its.add_all({its.begin(), its.end() - 2});
  std::size_t index = 0;
  while (on_first.contains(index) == on_its.contains(index)) ++index;
  throw UsageError("p.grad cleared on all ranks or on none",
                   "a backward that adds to the gradient of \"" + parameters_[index].facts.name + "\" " +
                       (on_first.contains(index) ? "on rank 0 and not " + there : there + " and not on rank 0"),
                   "let all ranks call zero_grad() alike");
}

variable_list TorchBridge::catch_gradient(int index, const variable_list& gradients) {
  Parameter& into = parameter(index);
  // If the parameter was frozen after its forward, autograd drops the gradient.
  if (!gradients[0].defined() || !into.facts.variable.requires_grad()) return gradients;
  arm();
  refuse_foreign_hooks(into);
  if (torch::autograd::impl::post_acc_grad_hooks(into.facts.variable)) {
    if (gradient_is(index) == GradientIs::foreign) return gradients;
    into.take_after = true;
    if (gradient_is(index) == GradientIs::none || is_shared_) {
      into.facts.variable.mutable_grad().reset();
      return gradients;
    }
    engine_.expect_gradient(into.unit, current_stream());  // its visit waits for the held gradient
    const at::NoGradGuard no_grad;
    const auto slot = static_cast<std::size_t>(index);
    at::Tensor sum = (is_brought(index) ? into.buffer : held(slot).inner()).clone();
    held(slot).scale(sum);
    into.facts.variable.mutable_grad().reset();
    return {sum.add_(gradients[0])};
  }
  if (gradient_is(index) == GradientIs::foreign) return gradients;
  write_gradient(index, gradients[0]);
  return {at::Tensor()};
}

void TorchBridge::after_accumulate(int index) {
  Parameter& from = parameter(index);
  if (!std::exchange(from.take_after, false)) return;
  const at::Tensor gradient = std::exchange(from.facts.variable.mutable_grad(), at::Tensor());
  if (gradient.defined()) write_gradient(index, gradient);  // undefined: the user's hook has used it up
}

void TorchBridge::write_gradient(int index, const at::Tensor& gradient) {
  Parameter& into = parameter(index);
  if (gradient.layout() != at::kStrided || gradient.scalar_type() != into.facts.dtype) {
    throw UsageError("a dense gradient of \"" + into.facts.name + "\" in its own dtype",
                     gradient.layout() != at::kStrided ? "a sparse one" : c10::toString(gradient.scalar_type()),
                     "use dense embeddings (sparse=False) and leave grad_dtype alone");
  }
  engine_.expect_gradient(into.unit, current_stream());
  const at::NoGradGuard no_grad;
  const auto slot = static_cast<std::size_t>(index);
  if (into.written) {
    into.buffer.add_(gradient);
  } else if (adds_to_held(index)) {
    if (!is_brought(index)) into.buffer.copy_(held(slot).inner(), /*non_blocking=*/true);
    held(slot).scale(into.buffer);
    into.buffer.add_(gradient);
  } else {
    held(slot).reuse(into.facts.variable.grad());
    into.buffer.copy_(gradient, /*non_blocking=*/true);
  }
  into.written = into.arrived = true;
  shown_->arrived(index, into.buffer);
  engine_.gradient_arrived(into.unit, Bytes{into.facts.gradient_offset}, into.facts.bytes());
}

// ---- the optimizer ----------------------------------------------------------------------------------------------

GradientIs TorchBridge::gradient_is(int index) const {
  const at::Tensor& gradient = parameter(index).facts.variable.grad();
  if (!gradient.defined()) return GradientIs::none;
  const auto slot = static_cast<std::size_t>(index);
  return has_held(slot) && held(slot).is(gradient) ? GradientIs::held : GradientIs::foreign;
}

void TorchBridge::take_foreign_gradient(int index) {
  const Parameter& from = parameter(index);
  if (is_shared_) refuse_foreign(from);
  engine_.access_held(from.unit, current_stream());
  const at::NoGradGuard no_grad;
  HeldGradient& taken = held(static_cast<std::size_t>(index));
  shown_->forget(index);
  taken.reuse(from.facts.variable.grad());
  taken.inner().copy_(from.facts.variable.grad());
}

void TorchBridge::gradient_is_written(UnitId unit) {
  refuse_other_process();
  engine_.access_held(unit, current_stream());
}

void TorchBridge::begin_step() {
  refuse_open_home();
  forget_failed_backward();
  refuse_unreduced();
  std::vector<int> scaled;
  std::vector<UnitId> units;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const int index = static_cast<int>(i);
    const Parameter& each = parameters_[i];
    if (!has_held(i) || gradient_is(index) != GradientIs::held) continue;
    // If something can write the memory unnoticed, the gradient counts as written.
    if (shows_gradients() && !held(i).is_private()) gradient_is_written(each.unit);
    if (held(i).scales().empty() || held(i).are_scales_told() || each.facts.scales == nullptr) continue;
    scaled.push_back(index);
    if (units.empty() || units.back() != each.unit) units.push_back(each.unit);
  }
  engine_.begin_step(current_stream(), units, [&] { write_scales(scaled); });
  shown_->begin_step();
}

void TorchBridge::write_scales(const std::vector<int>& indices) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> to, from;
  for (const int index : indices) {
    HeldGradient& scaled = held(static_cast<std::size_t>(index));
    auto* memory = reinterpret_cast<std::byte*>(parameter(index).facts.scales);
    for (const Scale& each : scaled.scales()) {
      to.push_back(tensor_over(backend_->device_address(memory), sizeof(float), device_, at::kFloat, {}, {}));
      memory += sizeof(float);
      if (each.by == Scale::By::number) {
        to.back().fill_(static_cast<float>(each.number));  // too large a number is infinite, as in torch
        to.pop_back();
      } else {
        from.push_back(each.tensor);
      }
    }
    scaled.tell_scales();
  }
  if (!to.empty()) at::_foreach_copy_(to, from, /*non_blocking=*/true);
}

std::pair<const float*, int> TorchBridge::late_scales(int index) const {
  const HeldGradient& scaled = held(static_cast<std::size_t>(index));
  NORIA_INVARIANT(scaled.scales().empty() || scaled.are_scales_told(), "an update lacks what multiplies its gradient");
  return {parameter(index).facts.scales, static_cast<int>(scaled.scales().size())};
}

std::vector<float> TorchBridge::take_scales(int index) {
  const auto [memory, count] = late_scales(index);
  held(static_cast<std::size_t>(index)).drop_scales();
  shown_->forget(index);
  return {memory, memory + count};
}

std::vector<float> TorchBridge::scale_values(int index) const {
  std::vector<float> values;
  for (const Scale& each : held(static_cast<std::size_t>(index)).scales()) {
    values.push_back(each.by == Scale::By::number ? static_cast<float>(each.number) : each.tensor.item<float>());
  }
  return values;
}

void TorchBridge::drop_scales(int index) {
  shown_->forget(index);
  held(static_cast<std::size_t>(index)).drop_scales();
}

int TorchBridge::first_scaled(const std::vector<int>& indices) const {
  at::Tensor one;  // most have the same factor; it is read once
  for (const int index : indices) {
    if (!has_held(static_cast<std::size_t>(index))) continue;
    for (const Scale& each : held(static_cast<std::size_t>(index)).scales()) {
      if (each.by == Scale::By::number) {
        if (each.number != 1) return index;
      } else if (!each.tensor.is_same(one)) {
        if (each.tensor.item<float>() != 1) return index;
        one = each.tensor;
      }
    }
  }
  return -1;
}

void TorchBridge::unscale_used(const std::vector<int>& indices, const at::Tensor& inverse) {
  const Scale scale = kept({Scale::By::unscaling, inverse, 1});
  for (const int index : indices) {
    if (!shown_->may_multiply(index)) apply_scales(index);
    if (is_shared_ || shown_->may_multiply(index)) {
      shown_->multiply(index, scale);
    } else {
      shown_->before_raw_write(index);
      multiply_by(held(static_cast<std::size_t>(index)).inner(), scale);
    }
  }
}

bool TorchBridge::apply_scales(int index) {
  if (!has_held(static_cast<std::size_t>(index))) return false;
  shown_->forget(index);
  if (held(static_cast<std::size_t>(index)).scales().empty()) return false;
  if (is_shared_) {
    parts_.multiply(index);
    return false;
  }
  gradient_is_written(parameter(index).unit);
  shown_->apply_scales(index);
  return device_.is_cuda();
}

std::vector<std::vector<double>> TorchBridge::sum_gradients(std::vector<std::pair<UnitId, UpdateJob>> jobs) {
  refuse_open_home();
  forget_failed_backward();
  refuse_unreduced();
  if (jobs.empty()) return {};  // also if there is no pool
  return engine_.sum_gradients(std::move(jobs), current_stream());
}

void TorchBridge::guard_gradients() {
  if (is_shared_) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (has_held(i) && gradient_is(static_cast<int>(i)) == GradientIs::held) held(i).guard();
  }
}

// ---- the home ---------------------------------------------------------------------------------------------------

void TorchBridge::open_home(const std::vector<UnitId>& units, const std::vector<std::byte*>& shown, bool write) {
  NORIA_INVARIANT(shown.size() == (is_shared_ ? units.size() : 0), "memory for whole weights, or a home that has them");
  forget_failed_backward();
  if (engine_.phase() && alone_ && entered_.empty()) engine_.end_pass(current_stream());
  if (engine_.phase()) {
    throw UsageError("noria.materialize between passes", "it inside a forward or backward pass",
                     "call it before the forward or after backward()");
  }
  for (UnitId unit : units) {
    if (is_staged_[static_cast<std::size_t>(unit.value)]) {
      throw UsageError("noria.materialize on weights in pinned memory, which the device can read",
                       "weights that the driver refused to pin (noria.report names the reason)",
                       "allow this process to pin more memory (ulimit -l unlimited, or the container's --ulimit "
                       "memlock=-1), or read the values from model.state_dict()");
    }
  }
  const std::size_t num_open = home_open_.size();
  for (std::size_t i = 0; i < units.size(); ++i) {
    const UnitId unit = units[i];
    try {
      engine_.access_home(unit, write);
    } catch (...) {  // for example, an update failed: closes what this call has opened
      close_home({home_open_.begin() + static_cast<std::ptrdiff_t>(num_open), home_open_.end()}, write);
      throw;
    }
    if (std::find(home_open_.begin(), home_open_.end(), unit) == home_open_.end()) {
      weights_[static_cast<std::size_t>(unit.value)]->attach(is_shared_ ? backend_->device_address(shown[i])
                                                                        : homes_[static_cast<std::size_t>(unit.value)]);
    }
    home_open_.push_back(unit);  // once per call, because materialize nests
  }
}

void TorchBridge::close_home(const std::vector<UnitId>& units, bool write) {
  for (UnitId unit : units) {
    const auto found = std::find(home_open_.begin(), home_open_.end(), unit);
    NORIA_INVARIANT(found != home_open_.end(), "a home is closed that was not open");
    home_open_.erase(found);
    UnitStorage& weights = *weights_[static_cast<std::size_t>(unit.value)];
    const bool written = weights.written();
    if (std::find(home_open_.begin(), home_open_.end(), unit) == home_open_.end()) weights.evict();
    if (write) bump_versions(parameters_of_[static_cast<std::size_t>(unit.value)]);
    else if (written && !is_shared_) engine_.access_home(unit, /*write_weights=*/true);  // against what the caller said
  }
}

std::string TorchBridge::bring_home() {
  const at::NoGradGuard no_grad;
  const std::set<UnitId> units(home_open_.begin(), home_open_.end());  // also those of enclosing `with` blocks
  const auto lies_at_home = [&](const at::Tensor& value) {
    return std::any_of(units.begin(), units.end(), [&](UnitId unit) {
      return weights_[static_cast<std::size_t>(unit.value)]->covers(value.storage().data());
    });
  };
  std::map<const void*, int> owners;  // by address of the memory
  std::string shared;
  std::vector<std::pair<int, at::Tensor>> strayed;
  for (UnitId unit : units) {
    for (int index : parameters_of_[static_cast<std::size_t>(unit.value)]) {
      const Parameter& each = parameter(index);
      const at::Tensor value = each.facts.variable.detach();
      // A tensor of another dtype or shape is refused when it is next used.
      if (value.scalar_type() != each.facts.dtype || value.sizes() != each.sizes) continue;
      if (!is_in_place(index)) strayed.emplace_back(index, value);
      if (value.numel() == 0) continue;
      const auto [owner, is_new] = owners.emplace(value.const_data_ptr(), index);
      if (!is_new && shared.empty()) {
        shared = "\"" + parameter(owner->second).facts.name + "\" and \"" + each.facts.name + "\"";
      }
    }
  }
  // Exchanged or transposed tensors overlap each other's place, so all are read before any is written.
  for (auto& [index, value] : strayed) {
    if (lies_at_home(value)) value = value.clone();
  }
  for (const auto& [index, value] : strayed) {
    const Parameter& each = parameter(index);
    const UnitStorage& storage = *weights_[static_cast<std::size_t>(each.unit.value)];
    storage.view(each.facts.dtype, each.facts.offset, each.sizes, each.strides).copy_(value);
    rejoin(index);
  }
  return shared;
}

void TorchBridge::refuse_open_home() const {
  if (home_open_.empty()) return;
  throw UsageError("a model whose weights are at home",
                   "a forward, a backward or optimizer.step() inside `with noria.materialize(...)`",
                   "leave the block before training goes on");
}

// Collectives get the home's own addresses, so the device must use the same ones.
void TorchBridge::refuse_other_addresses(std::byte* held) const {
  if (held == nullptr || backend_->device_address(held) == held) return;
  throw UsageError("a device that reads pinned host memory under the host's own addresses, where ranks share a model",
                   backend_->name() + ", which maps it elsewhere (cudaDevAttrCanUseHostPointerForRegisteredMem is 0)",
                   "train on Linux itself, not under WSL or a virtual GPU that lacks it, or with one rank a model");
}

void TorchBridge::refuse_other_process() const {
  if (getpid() == process_) return;
  throw UsageError("a wrapped model used in the process that wrapped it",
                   "it in process " + std::to_string(getpid()) + ", forked from " + std::to_string(process_),
                   "wrap inside the child, or let data loader workers leave the model alone");
}

void TorchBridge::close() {
  *self_ = nullptr;
  engine_.close();
  for (std::size_t u = 0; u < weights_.size(); ++u) weights_[u]->end(ended_message(names_[u]));
}

void TorchBridge::bump_versions(const std::vector<int>& indices) {
  for (int index : indices) parameter(index).facts.variable.unsafeGetTensorImpl()->bump_version();
}

void TorchBridge::raise_lost_writes() {
  if (lost_writes_.empty()) return;
  const std::string name = std::exchange(lost_writes_, {}).front();
  throw UsageError("parameters that only optimizer.step() changes while they are on the device",
                   "an in-place write to " + name + " inside forward or backward; it has been dropped",
                   "write inside `with noria.materialize(model):`, between passes");
}

// ---- EngineCallbacks --------------------------------------------------------------------------------------------

void TorchBridge::attach(UnitId unit, std::byte* weights) {
  weights_[static_cast<std::size_t>(unit.value)]->attach(weights);
  for (int index : parameters_of_[static_cast<std::size_t>(unit.value)]) {
    parameter(index).version = parameter(index).facts.variable._version();
  }
}

bool TorchBridge::evict(UnitId unit) {
  UnitStorage& weights = *weights_[static_cast<std::size_t>(unit.value)];
  // The bytes tell which it was: an operator that no version counter saw (`p.data.clamp_()`), or code that asked for
  // the pointer without `const` and only read. Compiled code does the latter at every visit.
  int& comparisons_left = comparisons_left_[static_cast<std::size_t>(unit.value)];
  const bool may_be_written = weights.written() || has_python_object(weights.storage());
  const bool is_asked = weights.is_told() || (may_be_written && comparisons_left > 0);
  const bool is_changed = is_asked && homes_[static_cast<std::size_t>(unit.value)] != nullptr &&
                          !weights.equals(homes_[static_cast<std::size_t>(unit.value)]);
  if (is_asked && !weights.is_told() && !is_changed) --comparisons_left;
  weights.evict();
  const std::size_t num_lost = lost_writes_.size();
  for (int index : parameters_of_[static_cast<std::size_t>(unit.value)]) {
    const Parameter& left = parameter(index);
    if (left.facts.variable._version() != left.version) lost_writes_.push_back("\"" + left.facts.name + "\"");
  }
  if (is_changed && lost_writes_.size() == num_lost) {
    lost_writes_.push_back("a parameter of " + names_[static_cast<std::size_t>(unit.value)]);
  }
  return lost_writes_.size() == num_lost;
}

void TorchBridge::open_gradients(UnitId unit, std::byte* buffer) {
  gradients_[static_cast<std::size_t>(unit.value)]->attach(buffer);
  for (int index : parameters_of_[static_cast<std::size_t>(unit.value)]) parameter(index).written = false;
}

void TorchBridge::home_moved(UnitId unit, std::byte* working) {
  if (is_shared_) return;
  homes_[static_cast<std::size_t>(unit.value)] = backend_->device_address(working);
}

void TorchBridge::held_moved(UnitId unit, std::byte* held) {
  for (int index : parameters_of_[static_cast<std::size_t>(unit.value)]) {
    const std::int64_t offset = parameter(index).facts.gradient_offset;
    if (offset >= 0) {
      this->held(static_cast<std::size_t>(index)).move_to(backend_->device_address(held + offset));
    }
  }
}

void TorchBridge::close_gradients(UnitId unit, bool is_drained) {
  gradients_[static_cast<std::size_t>(unit.value)]->evict();
  for (int index : parameters_of_[static_cast<std::size_t>(unit.value)]) {
    // The drained bytes have been multiplied by these scales already.
    if (is_drained && parameter(index).written) held(static_cast<std::size_t>(index)).drop_scales();
  }
  if (!shows_gradients()) return;
  // The loop may see this gradient in p.grad already, and it may be drafted before the backward ends. If a hook of the
  // user's writes it, noria hears of that from here on.
  for (int index : parameters_of_[static_cast<std::size_t>(unit.value)]) {
    if (gradient_is(index) == GradientIs::held) held(static_cast<std::size_t>(index)).guard();
  }
}

}  // namespace noria
