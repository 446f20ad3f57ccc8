// EngineOptions configures an engine. EngineParts lists what the owners inside the engine share.
#pragma once

#include <memory>
#include <optional>

#include "comm/collect_lane.h"
#include "device/backend.h"
#include "engine/collector.h"
#include "engine/engine_callbacks.h"
#include "engine/file_states.h"
#include "engine/file_weights.h"
#include "engine/issuer.h"
#include "engine/unit_table.h"
#include "optim/host_optimizer.h"
#include "plan/planner.h"
#include "store/gradient_ring.h"

namespace noria {

struct EngineOptions {
  Place device;
  Budget budget;
  bool prefetch_at_step = true;       // fetch the next forward's first units when `step` has queued their updates
  std::optional<GradientRing> ring;   // set: updates run inside backward; see engine/backward_updates.h
  std::shared_ptr<CollectLane> lane;  // set: ranks share the home; see engine/engine.h, Note [Shards]
  CollectScratch scratch;             // for the lane
  bool saves = false;                 // what forwards save may leave the device; see engine/activation_store.h
  FileStatesOptions files;            // state that lies in files
  FileWeightsOptions file_weights;    // frozen weights that lie there
  std::optional<Bytes> saved_room;    // device memory for what stays; none: as little as overlap allows

  /// Returns true if p.grad shows what is held, so that the user's loop may read and edit it.
  bool shows_gradients() const { return !ring && !lane; }
};

/// Refers to what the engine owns, shares or borrows. The owners inside the engine borrow it from there.
struct EngineParts {
  const EngineOptions& options;
  Backend& backend;
  UnitTable& units;
  BufferTable& buffers;
  EngineCallbacks& callbacks;
  HostOptimizer* optimizer;  // null: updates run on the launching thread
  Issuer& issuer;
  Collector* collector;  // null: ranks do not share the home
  FileStates* files;     // null: no state lies in files
  bool has_file(UnitId unit) const { return files != nullptr && files->has(unit); }
};

}  // namespace noria
