#include "bindings/bridge_parts.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>

#include "base/errors.h"

namespace noria {

Stream BridgeParts::current_stream() const {
  if (device.is_cpu()) return {};
  const c10::impl::VirtualGuardImpl guard(device.type());
  return Stream::of(guard.getStream(device).native_handle());
}

void BridgeParts::refuse_other_process() const {
  if (is_own_process()) return;
  throw UsageError("a wrapped model used in the process that wrapped it",
                   "it in process " + std::to_string(getpid()) + ", forked from " + std::to_string(process),
                   "wrap inside the child, or let data loader workers leave the model alone");
}

void BridgeParts::refuse_capture() const {
  if (!backend.is_captured(current_stream())) return;
  throw UsageError("a forward outside of torch.cuda.graph",
                   "one that is captured: a graph would replay the addresses of weights that move",
                   "train without CUDA graphs, or capture a model that is not wrapped");
}

}  // namespace noria
