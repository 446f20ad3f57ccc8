// BridgeParts lists what the owners inside TorchBridge share.
//
// Ownership: the bridge owns all of this. Its owners borrow it.
#pragma once

#include <c10/core/Device.h>

#include <unistd.h>

#include "bindings/parameter_table.h"
#include "device/backend.h"
#include "engine/engine.h"

namespace noria {

struct BridgeParts {
  const c10::Device device;
  const bool updates_in_backward;
  const bool is_shared;  // ranks share the model: each has a part of every unit
  const Shards shards;   // of size 1 if they do not
  const ParameterTable& parameters;
  Backend& backend;
  Engine& engine;
  const pid_t process = getpid();  // a forked child has the memory, but not the threads

  /// Returns true if the user's loop sees the held gradient in p.grad, and may edit it.
  bool shows_gradients() const { return !updates_in_backward && !is_shared; }
  /// Returns the stream that the calling thread uses on the device.
  Stream current_stream() const;
  /// Raises UsageError if the current stream's work is recorded for a CUDA graph.
  void refuse_capture() const;
  bool is_own_process() const { return getpid() == process; }
  void refuse_other_process() const;
};

}  // namespace noria
