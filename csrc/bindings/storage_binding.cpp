#include "bindings/storage_binding.h"

#include <limits>
#include <utility>

#include "base/errors.h"
#include "bindings/watched.h"

namespace noria {
namespace {

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

}  // namespace

/// Hears operators that write weights on the device. They may bypass version counters and storages.
class StorageBinding::Writes final : public Listener {
 public:
  explicit Writes(std::shared_ptr<StorageBinding*> binding) : binding_(std::move(binding)) {}

  void before_write(int unit) override {
    if (*binding_ != nullptr) (*binding_)->storages_[UnitId(unit)]->note_write();
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

void StorageBinding::bind(const std::vector<BridgedUnit>& units) {
  const std::size_t num_units = units.size();
  homes_ = UnitMap<std::byte*>(num_units, nullptr);
  is_staged_ = UnitMap<bool>(num_units, false);
  comparisons_left_ =
      UnitMap<int>(num_units, parts_.device.is_cpu() ? std::numeric_limits<int>::max() : kMostComparisons);
  versions_.resize(static_cast<std::size_t>(parts_.parameters.size()), 0);
  std::vector<std::unique_ptr<UnitStorage>> storages;
  for (const UnitId unit : parts_.parameters.units()) {
    const EngineUnit& engine = units[static_cast<std::size_t>(unit.value)].engine;
    const bool is_whole = engine.working != nullptr && !parts_.is_shared;
    if (is_whole) homes_[unit] = parts_.backend.device_address(engine.working);
    is_staged_[unit] = is_whole && homes_[unit] == nullptr;
    storages.push_back(std::make_unique<UnitStorage>(engine.facts.weights.count, parts_.device,
                                                     evicted_message(engine.facts.name, parts_.is_shared)));
    listen(storages.back()->storage(), writes_, unit.value);
  }
  storages_ = UnitMap<std::unique_ptr<UnitStorage>>(std::move(storages));
  for (int index = 0; index < parts_.parameters.size(); ++index) place(index);
}

void StorageBinding::end() {
  *self_ = nullptr;
  for (const UnitId unit : storages_.ids()) storages_[unit]->end(ended_message(parts_.parameters.unit_name(unit)));
}

// ---- on the device ----------------------------------------------------------------------------------------------

void StorageBinding::attach(UnitId unit, std::byte* weights) {
  storages_[unit]->attach(weights);
  for (const int index : parts_.parameters.of(unit)) {
    versions_[static_cast<std::size_t>(index)] = parts_.parameters[index].facts.variable._version();
  }
}

bool StorageBinding::evict(UnitId unit) {
  UnitStorage& weights = *storages_[unit];
  // The bytes tell if an operator wrote that no version counter saw (`p.data.clamp_()`). Other code asks for a pointer
  // to write and only reads; compiled code does so at every visit.
  int& comparisons_left = comparisons_left_[unit];
  const bool may_be_written = weights.written() || has_python_object(weights.storage());
  const bool is_asked = weights.is_told() || (may_be_written && comparisons_left > 0);
  const bool is_changed = is_asked && homes_[unit] != nullptr && !weights.equals(homes_[unit]);
  if (is_asked && !weights.is_told() && !is_changed) --comparisons_left;
  weights.evict();
  const std::size_t num_lost = lost_writes_.size();
  for (const int index : parts_.parameters.of(unit)) {
    const BridgedParameter& left = parts_.parameters[index].facts;
    if (left.variable._version() == versions_[static_cast<std::size_t>(index)]) continue;
    lost_writes_.push_back("\"" + left.name + "\"");
  }
  if (is_changed && lost_writes_.size() == num_lost) {
    lost_writes_.push_back("a parameter of " + parts_.parameters.unit_name(unit));
  }
  return lost_writes_.size() == num_lost;
}

void StorageBinding::raise_lost_writes() {
  if (lost_writes_.empty()) return;
  const std::string name = std::exchange(lost_writes_, {}).front();
  throw UsageError("parameters that only optimizer.step() changes while they are on the device",
                   "an in-place write to " + name + " inside forward or backward; it has been dropped",
                   "write inside `with noria.materialize(model):`, between passes");
}

void StorageBinding::check(const std::vector<UnitId>& units) {
  for (const UnitId unit : units) {
    for (const int index : parts_.parameters.of(unit)) {
      const BridgedParameter& checked = parts_.parameters[index].facts;
      if (!checked.may_have_gradient() && checked.variable.requires_grad()) {
        throw UsageError("parameter \"" + checked.name + "\" frozen, as it was when the model was wrapped",
                         "requires_grad=True", "unfreeze parameters before noria.wrap, or unwrap and wrap again");
      }
      if (rejoin(index)) {
        throw UsageError("parameter \"" + checked.name + "\" where noria.wrap put it",
                         "its data replaced (by .to(), .half(), load_state_dict(assign=True) or p.data = ...); the "
                         "home's values were kept",
                         "change dtypes before noria.wrap, and values inside `with noria.materialize(model):`");
      }
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

// ---- storages and the home --------------------------------------------------------------------------------------

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

void StorageBinding::home_moved(UnitId unit, std::byte* working) {
  if (parts_.is_shared) return;
  homes_[unit] = parts_.backend.device_address(working);
}

}  // namespace noria
