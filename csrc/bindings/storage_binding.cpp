#include "bindings/storage_binding.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#include <utility>

#include "base/errors.h"
#include "bindings/python_errors.h"
#include "bindings/watched.h"

namespace noria {
namespace {

std::string evicted(const std::string& unit) {
  return "it evicted (unit " + unit + " is evicted: use noria.materialize)";
}

std::string text_between_passes(const std::string& unit, bool is_shared) {
  return usage_text("unit \"" + unit + "\" on the device", evicted(unit),
                    std::string("read and edit parameters inside `with noria.materialize(model):`") +
                        (is_shared
                             ? ", which all ranks enter"
                             : "; or wrap with reads=\"home\", which shows them from step() to the next forward"));
}

std::string text_in_pass(const std::string& unit) {
  return usage_text("unit \"" + unit + "\" on the device", evicted(unit),
                    "call the module that holds it, or wrap with check=\"operators\": it finds weights that only some "
                    "passes use outside of their module");
}

std::string ended_message(const std::string& unit) {
  return usage_text("a backward before noria.unwrap, or the end of the model",
                    "one that needs weights of unit \"" + unit + "\", which have left the device",
                    "call backward() first, or run the forward again");
}

}  // namespace

/// Hears operators that write weights on the device. They may bypass version counters and storages.
class StorageBinding::Writes final : public Listener {
 public:
  explicit Writes(std::shared_ptr<StorageBinding*> binding) : binding_(std::move(binding)) {}

  void before_write(int unit) override {
    if (*binding_ != nullptr) (*binding_)->storages_[UnitId(unit)]->note_write();
  }
  void failed(int unit) override {
    if (*binding_ != nullptr) (*binding_)->refuse_strange_step(UnitId(unit));
  }

 private:
  const std::shared_ptr<StorageBinding*> binding_;
};

StorageBinding::StorageBinding(const BridgeParts& parts)
    : parts_(parts),
      self_(std::make_shared<StorageBinding*>(this)),
      writes_(std::make_shared<Writes>(self_)) {}

StorageBinding::~StorageBinding() {
  *self_ = nullptr;
  for (const UnitId unit : storages_.ids()) stop_listening(storages_[unit]->storage());
}

void StorageBinding::bind(const UnitMap<BridgedUnit>& units) {
  const std::size_t num_units = units.size();
  facts_ = UnitMap<UnitFacts>(num_units, {});
  working_ = UnitMap<std::byte*>(num_units, nullptr);
  in_file_ = UnitMap<ByteRange>(num_units, {});
  between_passes_ = in_pass_ = UnitMap<std::string>(num_units, {});
  if (!parts_.device.is_cpu()) looks_.emplace(parts_.device, num_units);
  versions_.resize(static_cast<std::size_t>(parts_.parameters.size()), 0);
  std::vector<std::unique_ptr<UnitStorage>> storages;
  for (const UnitId unit : parts_.parameters.units()) {
    const EngineUnit& engine = units[unit].engine;
    facts_[unit] = engine.facts;
    working_[unit] = engine.working;
    in_file_[unit] = engine.in_file;
    between_passes_[unit] = text_between_passes(engine.facts.name, parts_.is_shared);
    in_pass_[unit] = text_in_pass(engine.facts.name);
    storages.push_back(std::make_unique<UnitStorage>(engine.facts.weights.count, parts_.device, between_passes_[unit]));
    listen(storages.back()->storage(), writes_, unit.value);
  }
  storages_ = UnitMap<std::unique_ptr<UnitStorage>>(std::move(storages));
  for (int index = 0; index < parts_.parameters.size(); ++index) place(index);
}

void StorageBinding::end() {
  *self_ = nullptr;
  for (const UnitId unit : storages_.ids()) {
    storages_[unit]->evict();
    storages_[unit]->refuse_with(ended_message(parts_.parameters.unit_name(unit)));
  }
}

void StorageBinding::tell_pass(bool is_under_way) {
  if (is_pass_under_way_.exchange(is_under_way) == is_under_way) return;
  for (const UnitId unit : storages_.ids()) {
    storages_[unit]->refuse_with(is_under_way ? in_pass_[unit] : between_passes_[unit]);
  }
}

// An operator on weights has raised. They may be those of an optimizer that noria does not know.
void StorageBinding::refuse_strange_step(UnitId unit) const {
  if (storages_[unit]->attached() || is_pass_under_way_) return;
  const auto optimizer = stepping_optimizer();
  if (!optimizer) return;
  throw UsageError("unit \"" + facts_[unit].name + "\" on the device",
                   evicted(facts_[unit].name) + ", and " + optimizer->name + ".step() about to use it",
                   optimizer->is_wrapped
                       ? "wrap the optimizer before a scaler or a framework keeps its step(), which noria replaces"
                       : "give this optimizer to noria.wrap, in one list with all others of the model");
}

// ---- on the device ----------------------------------------------------------------------------------------------

void StorageBinding::attach(UnitId unit, std::byte* weights) {
  storages_[unit]->attach(weights);
  for (const int index : parts_.parameters.of(unit)) {
    versions_[static_cast<std::size_t>(index)] = parts_.parameters[index].facts.variable._version();
  }
  if (looks_ && looks_->is_watched(unit)) looks_->begin(unit, storages_[unit]->bytes());
}

bool StorageBinding::evict(UnitId unit) {
  UnitStorage& weights = *storages_[unit];
  if (!weights.attached()) return true;  // it failed before that
  // Operators report their writes, also those that no version counter sees (`p.data.clamp_()`).
  const bool is_told = weights.is_told();
  std::vector<std::string> lost;
  for (const int index : parts_.parameters.of(unit)) {
    const BridgedParameter& left = parts_.parameters[index].facts;
    if (left.variable._version() == versions_[static_cast<std::size_t>(index)]) continue;
    lost.push_back("\"" + left.name + "\"");
  }
  const bool may_be_written = !lost.empty() || is_told || weights.written() || has_python_object(weights.storage());
  const at::Tensor shown = may_be_written ? weights.bytes() : at::Tensor();
  weights.evict();
  if (!lost.empty()) {
    // Some count that write nothing, such as `p.set_(p)`, by which torch parametrizes a weight.
    if (parts_.shards.size == 1 && is_as_at_home(unit, shown)) lost.clear();
  } else if (may_be_written) {
    // A rank cannot see a write to other ranks' shards, so there any operator counts that writes.
    const bool is_of_all = is_told && parts_.shards.size > 1;
    if (!is_told && looks_ && looks_->has_begun(unit)) looks_->end(unit, shown);
    else if (is_of_all || !is_as_at_home(unit, shown)) lost.push_back(some_parameter_of(unit));
    if (looks_ && !is_told) looks_->watch(unit);
  }
  if (looks_) looks_->drop(unit);
  const MutexLock lock(mutex_);
  lost_writes_.insert(lost_writes_.end(), lost.begin(), lost.end());
  return lost.empty();
}

// On the device if it can address the home, else on the host.
at::Tensor StorageBinding::home_bytes(const HomePiece& piece) const {
  std::byte* const seen = piece.is_in_file ? nullptr : parts_.backend.device_address(piece.memory);
  const c10::Device device = seen != nullptr ? parts_.device : c10::Device(c10::kCPU);
  return tensor_over(seen != nullptr ? seen : piece.memory, piece.bytes.count, device, at::kByte, {piece.bytes.count},
                     {1});
}

std::byte* StorageBinding::home_of(UnitId unit) const {
  if (working_[unit] == nullptr || (!parts_.device.is_cpu() && lies_in_file(unit))) return nullptr;
  return parts_.backend.device_address(working_[unit]);
}

bool StorageBinding::is_as_at_home(UnitId unit, const at::Tensor& shown) const {
  if (working_[unit] == nullptr) return true;
  for (const HomePart& part : home_parts(facts_[unit], working_[unit], parts_.shards)) {
    for (const HomePiece& piece : pieces_of(part, working_[unit], in_file_[unit])) {
      const at::Tensor home = home_bytes(piece);
      const Bytes begin = part.begin + piece.begin;
      if (!at::equal(shown.narrow(0, begin.count, piece.bytes.count).to(home.device()), home)) return false;
    }
  }
  return true;
}

std::vector<UnitId> StorageBinding::take_stale() {
  const MutexLock lock(mutex_);
  return std::exchange(stale_, {});
}

void StorageBinding::raise_late_writes(bool waits) {
  if (looks_ && parts_.is_own_process()) {
    for (const UnitId unit : looks_->changed(waits)) {
      const MutexLock lock(mutex_);
      lost_writes_.push_back(some_parameter_of(unit));
      stale_.push_back(unit);
    }
  }
  raise_lost_writes();
}

std::string StorageBinding::some_parameter_of(UnitId unit) const {
  return "a parameter of " + parts_.parameters.unit_name(unit);
}

void StorageBinding::raise_lost_writes() {
  std::string name;
  {
    const MutexLock lock(mutex_);
    if (lost_writes_.empty()) return;
    name = std::exchange(lost_writes_, {}).front();
  }
  throw UsageError("parameters that only optimizer.step() changes while they are on the device",
                   "an in-place write to " + name + " inside forward or backward; it has been dropped",
                   "write inside `with noria.materialize(model):`, between passes");
}

void StorageBinding::check(const std::vector<UnitId>& units) {
  for (const UnitId unit : units) {
    for (const int index : parts_.parameters.of(unit)) {
      const BridgedParameter& checked = parts_.parameters[index].facts;
      if (!checked.may_have_gradient() && checked.variable.requires_grad() && at::GradMode::is_enabled()) {
        throw UsageError(
            "parameter \"" + checked.name + "\" frozen, as it was when the model was wrapped", "requires_grad=True",
            "unfreeze parameters between steps, and call the whole model first: its forward finds them; or "
            "noria.unwrap and wrap again");
      }
      if (is_in_place(index)) continue;
      const bool is_resized = checked.variable.sizes() != parts_.parameters[index].sizes;
      place(index);
      if (is_resized) {
        throw UsageError("parameter \"" + checked.name + "\" in the shape that it had at noria.wrap",
                         "its data replaced by data of another shape; the home's values were kept",
                         "noria.unwrap, change the shape, make the optimizer anew, and wrap both again");
      }
      throw UsageError("parameter \"" + checked.name + "\" where noria.wrap put it",
                       "its data replaced (by .to(), .half(), load_state_dict(assign=True) or p.data = ...); the "
                       "home's values were kept",
                       "change dtypes before noria.wrap, and values inside `with noria.materialize(model):`");
    }
  }
}

// ---- where parameters are ---------------------------------------------------------------------------------------

bool StorageBinding::is_in_place(int index) const {
  const Parameter& asked = parts_.parameters[index];
  const at::Tensor& variable = asked.facts.variable;
  return storages_[asked.unit]->holds(variable) && variable.scalar_type() == asked.facts.dtype &&
         variable.sizes() == asked.sizes && variable.strides() == asked.strides &&
         variable.storage_offset() * static_cast<std::int64_t>(variable.itemsize()) == asked.facts.offset;
}

bool StorageBinding::rejoin(int index) {
  if (is_in_place(index)) return false;
  place(index);
  return true;
}

void StorageBinding::place(int index) {
  const Parameter& placed = parts_.parameters[index];
  placed.facts.variable.set_data(storages_[placed.unit]->view(placed.facts.dtype, placed.facts.offset, placed.sizes,
                                                              placed.strides, written_keys()));
}

void StorageBinding::release(int index, const at::Tensor& replacement) {
  parts_.parameters[index].facts.variable.set_data(replacement);
}

void StorageBinding::bump_versions(const std::vector<int>& indices) {
  for (const int index : indices) parts_.parameters[index].facts.variable.unsafeGetTensorImpl()->bump_version();
}

// ---- storages ---------------------------------------------------------------------------------------------------

bool StorageBinding::has(const c10::Storage& storage) const {
  for (const UnitId unit : storages_.ids()) {
    if (storages_[unit]->is(storage)) return true;
  }
  return false;
}

bool StorageBinding::is_attached(const c10::Storage& storage) const {
  for (const UnitId unit : storages_.ids()) {
    if (storages_[unit]->attached() && storages_[unit]->is(storage)) return true;
  }
  return false;
}

}  // namespace noria
