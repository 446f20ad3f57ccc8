// Which operators the pretend GPU has: all that have a CPU kernel, by name, so that none goes to a composite one where
// the CPU has its own; those that CUDA has kernels for and the CPU composes; and, as a fallback, all others.
#include "register.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <set>
#include <string>

#include "launch.h"
#include "streams.h"

namespace pretend_gpu {
namespace {

bool is_one_kernel(const c10::OperatorHandle& op, const std::string& name) {
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) return true;
  // One launch for a list of tensors.
  if (name.rfind("_foreach_", 0) == 0)
    return name.find("_out") == std::string::npos && name.find(".out") == std::string::npos;
  // On the CPU the library that suits best runs them, and decides their bits.
  static const std::set<std::string> names = {"convolution", "convolution_backward"};
  return names.count(name) > 0;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>()); }

}  // namespace

void register_operators() {
  // Kept for good, as libraries are.
  auto* library = new torch::Library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(kKey)) continue;
    const std::string plain = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (is_one_kernel(*op, plain)) library->impl(plain.c_str(), torch::CppFunction::makeFromBoxedFunction<&launch>());
  }
}

}  // namespace pretend_gpu
