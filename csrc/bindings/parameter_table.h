// ParameterTable lists the parameters of a wrap call: what is known of each one when it is wrapped, by index and by
// unit. Nothing in it changes later.
//
// Ownership: keeps the parameters alive. The owners inside TorchBridge borrow it.
// Threads: any; it is only read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/unit_map.h"
#include "engine/unit.h"

namespace noria {

/// Describes one parameter of a unit. `gradient_offset` is -1 if the parameter was frozen when it was wrapped.
struct BridgedParameter {
  at::Tensor variable;
  std::string name;
  at::ScalarType dtype = at::kFloat;  // of the working copy
  std::int64_t offset = 0;            // bytes, in the unit's working copy
  std::int64_t gradient_offset = -1;  // bytes, in the unit's gradient layout
  float* scales = nullptr;            // in the home: the late scales of its gradient; null: it never has any

  bool may_have_gradient() const { return gradient_offset >= 0; }
  Bytes gradient_begin() const { return {gradient_offset}; }
  Bytes bytes() const { return {variable.numel() * variable.element_size()}; }
};

struct BridgedUnit {
  EngineUnit engine;
  std::vector<BridgedParameter> parameters;
};

struct Parameter {
  BridgedParameter facts;
  UnitId unit;
  std::vector<std::int64_t> sizes, strides;
};

class ParameterTable {
 public:
  explicit ParameterTable(const UnitMap<BridgedUnit>& units) : of_(units.size()), names_(units.size()) {
    for (const UnitId unit : names_.ids()) {
      const BridgedUnit& described = units[unit];
      names_[unit] = described.engine.facts.name;
      for (const BridgedParameter& facts : described.parameters) {
        of_[unit].push_back(static_cast<int>(parameters_.size()));
        parameters_.push_back({facts, unit, facts.variable.sizes().vec(), facts.variable.strides().vec()});
      }
    }
  }

  const Parameter& operator[](int index) const { return parameters_[static_cast<std::size_t>(index)]; }
  int size() const { return static_cast<int>(parameters_.size()); }
  /// Returns the indices of this unit's parameters.
  const std::vector<int>& of(UnitId unit) const { return of_[unit]; }
  const std::string& unit_name(UnitId unit) const { return names_[unit]; }
  UnitIds units() const { return names_.ids(); }
  std::size_t num_units() const { return names_.size(); }

 private:
  std::vector<Parameter> parameters_;
  UnitMap<std::vector<int>> of_;
  UnitMap<std::string> names_;
};

}  // namespace noria
