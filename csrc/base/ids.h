// Defines ids: numbers that name units, buffers, hooks, ops and saved storages. An id of one kind does not convert into
// another; Version and MicroBatch are plain numbers.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>

namespace noria {

template <class Tag, class Value = std::int32_t>
struct Id {
  Value value = -1;

  constexpr Id() = default;
  constexpr explicit Id(Value v) : value(v) {}
  constexpr bool valid() const { return value >= 0; }
  constexpr auto operator<=>(const Id&) const = default;
};

using UnitId = Id<struct UnitTag>;                  // index into the engine's units
using BufferId = Id<struct BufferTag>;              // index into a BufferTable
using HookId = Id<struct HookTag>;                  // a module that announces visits; -1: between modules
using OpId = Id<struct OpTag, std::int64_t>;        // position in issue order, never reused
using SavedId = Id<struct SavedTag, std::int64_t>;  // a storage that a forward has saved, never reused
using Version = std::int64_t;                       // of the bytes in a buffer: the number of writes in issue order
using MicroBatch = std::int32_t;                    // 0 while one micro-batch is in flight

}  // namespace noria

template <class Tag, class Value>
struct std::hash<noria::Id<Tag, Value>> {
  std::size_t operator()(noria::Id<Tag, Value> id) const noexcept { return std::hash<Value>{}(id.value); }
};
