#include "bindings/home_view.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/errors.h"

namespace noria {

bool HomeView::is_open(UnitId unit) const { return std::find(open_.begin(), open_.end(), unit) != open_.end(); }

void HomeView::open(const std::vector<UnitId>& units, const std::vector<std::byte*>& shown, bool write,
                    bool writes_frozen) {
  NORIA_INVARIANT(shown.size() == (parts_.is_shared ? units.size() : 0),
                  "memory for whole weights, or a home that has them");
  if (parts_.engine.phase()) {
    throw UsageError("noria.materialize between passes", "it inside a forward or backward pass",
                     "call it before the forward or after backward()");
  }
  for (const UnitId unit : units) {
    if (!parts_.is_shared && storages_.is_staged(unit) && storages_.lies_in_file(unit)) {
      throw UsageError("noria.materialize on weights in host memory, which the device can read",
                       "frozen weights of unit \"" + parts_.parameters.unit_name(unit) + "\" in a file",
                       "read them from model.state_dict(), and write them by model.load_state_dict()");
    }
    if (!parts_.is_shared && storages_.is_staged(unit)) {
      throw UsageError("noria.materialize on weights in pinned memory, which the device can read",
                       "weights that the driver refused to pin (noria.report names the reason)",
                       "allow this process to pin more memory (ulimit -l unlimited, or the container's --ulimit "
                       "memlock=-1), or read the values from model.state_dict()");
    }
  }
  const std::size_t num_open = open_.size();
  for (std::size_t i = 0; i < units.size(); ++i) {
    const UnitId unit = units[i];
    try {
      parts_.engine.access_home(unit, write, writes_frozen);
    } catch (...) {  // for example, an update failed: closes what this call has opened
      close(num_open, write);
      throw;
    }
    if (!is_open(unit)) {
      storages_[unit].attach(parts_.is_shared ? parts_.backend.device_address(shown[i]) : storages_.home_of(unit));
    }
    open_.push_back(unit);
  }
}

void HomeView::close(std::size_t before, bool write) {
  while (open_.size() > before) {
    const UnitId unit = open_.back();
    open_.pop_back();
    UnitStorage& weights = storages_[unit];
    const bool written = weights.written();
    if (!is_open(unit)) weights.evict();
    if (write) storages_.bump_versions(parts_.parameters.of(unit));
    else if (written && !parts_.is_shared)
      parts_.engine.access_home(unit, /*write_weights=*/true);  // the caller was to read only
  }
}

std::string HomeView::bring() {
  const at::NoGradGuard no_grad;
  const std::set<UnitId> units(open_.begin(), open_.end());  // also those of enclosing `with` blocks
  const auto lies_at_home = [&](const at::Tensor& value) {
    return std::any_of(units.begin(), units.end(),
                       [&](UnitId unit) { return storages_[unit].covers(value.storage().data()); });
  };
  std::map<const void*, int> owners;  // by address of the memory
  std::string shared;
  std::vector<std::pair<int, at::Tensor>> strayed;
  for (const UnitId unit : units) {
    for (const int index : parts_.parameters.of(unit)) {
      const Parameter& each = parts_.parameters[index];
      const at::Tensor value = each.facts.variable.detach();
      // A tensor of another dtype or shape is refused when it is next used.
      if (value.scalar_type() != each.facts.dtype || value.sizes() != each.sizes) continue;
      if (!storages_.is_in_place(index)) strayed.emplace_back(index, value);
      if (value.numel() == 0) continue;
      const auto [owner, is_new] = owners.emplace(value.const_data_ptr(), index);
      if (!is_new && shared.empty()) {
        shared = "\"" + parts_.parameters[owner->second].facts.name + "\" and \"" + each.facts.name + "\"";
      }
    }
  }
  // Exchanged or transposed tensors overlap each other's place, so all are read before any is written.
  for (auto& [index, value] : strayed) {
    if (lies_at_home(value)) value = value.clone();
  }
  for (const auto& [index, value] : strayed) {
    const Parameter& each = parts_.parameters[index];
    storages_[each.unit].view(each.facts.dtype, each.facts.offset, each.sizes, each.strides).copy_(value);
    storages_.rejoin(index);
  }
  return shared;
}

void HomeView::refuse_open() const {
  if (open_.empty()) return;
  throw UsageError("a model whose weights are at home",
                   "a forward, a backward or optimizer.step() inside `with noria.materialize(...)`",
                   "leave the block before training goes on");
}

}  // namespace noria
