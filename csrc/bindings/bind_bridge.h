// Shows Python a TorchBridge in parts: each is a small class with the functions of one topic.
//
// Example: `engine.hooks.enter(hook)`, `engine.updates.begin_step()`.
// Ownership: a part keeps the bridge alive.
// Threads: a function that takes the engine's gate (engine/call_gate.h) releases the GIL first. The thread inside may
// want it: an update on the launching thread does.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/bind_words.h"
#include "bindings/torch_bridge.h"

namespace noria {

struct BridgePart {
  std::shared_ptr<TorchBridge> bridge;

  TorchBridge* operator->() const { return bridge.get(); }
  Engine& engine() const { return bridge->engine(); }
};

struct EngineHooks : BridgePart {};
struct EngineGradients : BridgePart {};
struct EngineHome : BridgePart {};
struct EngineRanks : BridgePart {};
struct EngineUpdates : BridgePart {};
struct EngineBackward : BridgePart {};
struct EngineSaved : BridgePart {};
struct EngineCopies : BridgePart {};
struct EngineStatistics : BridgePart {};
struct EngineRest : BridgePart {};

/// Binds a member function of one of the bridge's owners.
template <class Part, class Owner, class Result, class... Arguments>
auto of_owner(Owner& (TorchBridge::*owner)(), Result (Owner::*call)(Arguments...)) {
  return [=](const Part& self, Arguments... arguments) -> Result {
    return ((self.bridge.get()->*owner)().*call)(std::forward<Arguments>(arguments)...);
  };
}
template <class Part, class Owner, class Result, class... Arguments>
auto of_owner(Owner& (TorchBridge::*owner)(), Result (Owner::*call)(Arguments...) const) {
  return [=](const Part& self, Arguments... arguments) -> Result {
    return ((self.bridge.get()->*owner)().*call)(std::forward<Arguments>(arguments)...);
  };
}

inline std::vector<std::byte*> pointers(const std::vector<std::int64_t>& addresses) {
  std::vector<std::byte*> found;
  for (std::int64_t address : addresses) found.push_back(pointer(address));
  return found;
}

inline std::vector<UnitId> unit_ids(const std::vector<std::int32_t>& units) {
  std::vector<UnitId> ids;
  for (std::int32_t unit : units) ids.emplace_back(unit);
  return ids;
}

inline std::vector<std::int32_t> plain(const std::vector<UnitId>& ids) {
  std::vector<std::int32_t> units;
  for (UnitId id : ids) units.push_back(id.value);
  return units;
}

/// Shares the callback, so that a copy needs no GIL. The last owner takes the GIL and frees it.
inline std::shared_ptr<pybind11::function> keep(pybind11::function callback) {
  return {new pybind11::function(std::move(callback)), [](pybind11::function* held) {
            const pybind11::gil_scoped_acquire gil;
            delete held;
          }};
}

void bind_bridge_autograd(pybind11::module_& m);  // hooks, gradients, home, ranks
void bind_bridge_engine(pybind11::module_& m);    // updates, backward, statistics
void bind_bridge_memory(pybind11::module_& m);    // saved, copies, rest

}  // namespace noria
