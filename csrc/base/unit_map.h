// UnitMap holds one value for each unit of a wrap call, and is indexed by UnitId.
//
// Threads: as std::vector.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/ids.h"

namespace noria {

/// Lists the ids 0, 1, 2... of `count` units, for a loop over all of them.
class UnitIds {
 public:
  class Iterator {
   public:
    constexpr explicit Iterator(std::int32_t value) : value_(value) {}
    constexpr UnitId operator*() const { return UnitId(value_); }
    constexpr Iterator& operator++() {
      ++value_;
      return *this;
    }
    constexpr bool operator==(const Iterator&) const = default;

   private:
    std::int32_t value_;
  };

  constexpr explicit UnitIds(std::size_t count) : count_(static_cast<std::int32_t>(count)) {}
  constexpr Iterator begin() const { return Iterator(0); }
  constexpr Iterator end() const { return Iterator(count_); }

 private:
  std::int32_t count_;
};

template <class Value>
class UnitMap {
 public:
  UnitMap() = default;
  explicit UnitMap(std::size_t num_units, const Value& value = Value()) : cells_(num_units, Cell{value}) {}
  explicit UnitMap(std::vector<Value> values) {
    cells_.reserve(values.size());
    for (Value& value : values) cells_.push_back({std::move(value)});
  }

  Value& operator[](UnitId unit) { return cells_[static_cast<std::size_t>(unit.value)].value; }
  const Value& operator[](UnitId unit) const { return cells_[static_cast<std::size_t>(unit.value)].value; }

  std::size_t size() const { return cells_.size(); }
  bool empty() const { return cells_.empty(); }
  UnitIds ids() const { return UnitIds(cells_.size()); }
  void fill(const Value& value) {
    for (Cell& cell : cells_) cell.value = value;
  }

 private:
  struct Cell {  // so that a map of bool gives references, too
    Value value;
  };
  std::vector<Cell> cells_;
};

}  // namespace noria
