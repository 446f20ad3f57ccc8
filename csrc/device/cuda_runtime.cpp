#include "device/cuda_runtime.h"

#include <string_view>
#include <vector>

#include <dlfcn.h>
#include <link.h>

#include "base/errors.h"
#include "base/mutex.h"

namespace noria::cuda {
namespace {

constexpr std::string_view kLibrary = "libcudart";
// The versions that torch 2.11 and later are built with, and room for newer ones.
constexpr int kNewest = 16;
constexpr int kOldest = 12;

/// Looks up every call. Returns the names of missing ones, or an empty string.
std::string look_up(void* library, Runtime& runtime) {
  std::string missing;
#define NORIA_LOOK_UP(returns, name, parameters)                                        \
  runtime.name = reinterpret_cast<returns(*) parameters>(dlsym(library, "cuda" #name)); \
  if (runtime.name == nullptr) missing += missing.empty() ? "cuda" #name : ", cuda" #name;
  NORIA_CUDA_CALLS(NORIA_LOOK_UP)
#undef NORIA_LOOK_UP
  return missing;
}

/// torch's wheels ship libcudart.so.13; some builds of torch ship libcudart-<hash>.so.12.
bool is_runtime(std::string_view path) {
  const std::size_t slash = path.rfind('/');
  const std::string_view name = slash == std::string_view::npos ? path : path.substr(slash + 1);
  return name.starts_with(kLibrary) && name.find(".so") != std::string_view::npos;
}

/// Returns the runtime that torch itself calls, if it is a library: other packages may have loaded another one first.
std::vector<std::string> torchs_runtime() {
  void* const torch = dlopen("libc10_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  if (torch == nullptr) return {};
  Dl_info found{};
  void* const call = dlsym(torch, "cudaGetDevice");  // also looks into the libraries that it needs
  const bool is_found = call != nullptr && dladdr(call, &found) != 0 && found.dli_fname != nullptr;
  dlclose(torch);
  return is_found && is_runtime(found.dli_fname) ? std::vector<std::string>{found.dli_fname}
                                                 : std::vector<std::string>{};
}

/// Returns torch's first.
std::vector<std::string> loaded_runtimes() {
  std::vector<std::string> paths = torchs_runtime();
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* found) {
        if (info->dlpi_name != nullptr && is_runtime(info->dlpi_name)) {
          static_cast<std::vector<std::string>*>(found)->emplace_back(info->dlpi_name);
        }
        return 0;
      },
      &paths);
  return paths;
}

std::shared_ptr<const Runtime> try_open(const std::string& path, std::string& why_not) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* text = dlerror();
    why_not = text == nullptr ? path + " cannot be opened" : text;
    return nullptr;
  }
  auto runtime = std::make_shared<Runtime>();
  runtime->path = path;
  const std::string missing = look_up(library, *runtime);
  if (missing.empty()) return runtime;
  why_not = path + " has no " + missing;
  return nullptr;
}

}  // namespace

std::shared_ptr<const Runtime> Runtime::open(const std::string& path) {
  std::string why_not;
  auto runtime = try_open(path, why_not);
  if (!runtime) throw MachineError("opening a CUDA runtime failed: " + why_not);
  return runtime;
}

std::shared_ptr<const Runtime> Runtime::find(std::string* absent) {
  static Mutex mutex;
  static auto* const found = new std::shared_ptr<const Runtime>;  // never destroyed: events outlive static objects
  const MutexLock lock(mutex);
  if (*found) return *found;
  std::string why_not;
  std::vector<std::string> candidates = loaded_runtimes();
  const bool is_any_loaded = !candidates.empty();
  for (int version = kNewest; version >= kOldest; --version) {
    candidates.push_back(std::string(kLibrary) + ".so." + std::to_string(version));
  }
  for (const std::string& path : candidates) {
    std::string reason;
    *found = try_open(path, reason);
    if (*found) return *found;
    if (is_any_loaded && why_not.empty()) why_not = "the CUDA runtime that is loaded cannot be used: " + reason;
  }
  if (why_not.empty()) {
    why_not = "torch has loaded no CUDA runtime, and the system has none (libcudart.so." + std::to_string(kOldest) +
              " to ." + std::to_string(kNewest) + ")";
  }
  if (absent != nullptr) *absent = why_not;
  return nullptr;
}

}  // namespace noria::cuda
