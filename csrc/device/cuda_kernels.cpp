#include "device/cuda_kernels.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include <dlfcn.h>

#include "base/errors.h"
#include "device/kernel_images.h"

namespace noria {
namespace {

constexpr std::int64_t kThreadsPerBlock = 256;
constexpr std::int64_t kMostBlocks = 1 << 14;  // kernels loop over the rest

}  // namespace

// A CUresult is 0 if the call has succeeded.
struct CudaKernels::Driver {
  int (*module_load_data)(CUmod_st** module, const void* image) = nullptr;
  int (*module_get_function)(CUfunc_st** function, CUmod_st* module, const char* name) = nullptr;
  int (*launch_kernel)(CUfunc_st* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream_st* stream,
                       void** parameters, void** extra) = nullptr;

  /// Returns null if no library has all calls.
  static std::unique_ptr<const Driver> find(const std::string& runtime_path) {
    for (const char* path : {runtime_path.c_str(), "libcuda.so.1"}) {
      void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) continue;
      auto calls = std::make_unique<Driver>();
      const auto look_up = [&](auto& call, const char* name) {
        call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(dlsym(library, name));
        return call != nullptr;
      };
      if (look_up(calls->module_load_data, "cuModuleLoadData") &&
          look_up(calls->module_get_function, "cuModuleGetFunction") &&
          look_up(calls->launch_kernel, "cuLaunchKernel")) {
        return calls;
      }
    }
    return nullptr;
  }
};

CudaKernels::CudaKernels(const CudaDevice& device) : device_(device) {}
CudaKernels::~CudaKernels() = default;

std::string CudaKernels::absent() {
  const MutexLock lock(mutex_);
  return load();
}

std::string CudaKernels::load() {
  if (std::exchange(is_loaded_, true)) return absent_;
  if (kernel_images().empty()) {
    absent_ = "this build of noria has no kernels for devices: nvcc was missing when it was built";
    return absent_;
  }
  driver_ = Driver::find(device_->path);
  if (!driver_) {
    absent_ = "this process has no CUDA driver (libcuda.so.1)";
    return absent_;
  }
  (void)device_->Free(nullptr);  // makes the device's context the thread's own
  for (const void* image : kernel_images()) {
    CUmod_st* module = nullptr;
    const int error = driver_->module_load_data(&module, image);
    if (error != 0) {
      absent_ = device_.name() + " cannot load noria's kernels (CUresult " + std::to_string(error) + ")";
      return absent_;
    }
    modules_.push_back(module);
  }
  return absent_;
}

CUfunc_st* CudaKernels::function(const std::string& name) {
  const std::string why_not = load();
  if (!why_not.empty()) throw MachineError("a kernel on " + device_.name() + ": " + why_not);
  const auto known = functions_.find(name);
  if (known != functions_.end()) return known->second;
  for (CUmod_st* module : modules_) {
    CUfunc_st* found = nullptr;
    if (driver_->module_get_function(&found, module, name.c_str()) == 0) return functions_[name] = found;
  }
  NORIA_INVARIANT(false, "noria has no kernel " + name);
}

void CudaKernels::launch(const std::string& name, std::int64_t num_threads, const std::vector<void*>& parameters,
                         cuda::StreamHandle stream) {
  if (num_threads == 0) return;
  const MutexLock lock(mutex_);
  CUfunc_st* const kernel = function(name);
  std::vector<void*> copied = parameters;  // the driver does not promise to leave the list as it is
  const std::int64_t blocks = std::min((num_threads + kThreadsPerBlock - 1) / kThreadsPerBlock, kMostBlocks);
  const int error =
      driver_->launch_kernel(kernel, static_cast<unsigned>(blocks), 1, 1, static_cast<unsigned>(kThreadsPerBlock), 1, 1,
                             0, stream, copied.data(), nullptr);
  if (error == 0) return;
  throw MachineError("launching " + name + " on " + device_.name() + " failed (CUresult " + std::to_string(error) +
                     ")");
}

}  // namespace noria
