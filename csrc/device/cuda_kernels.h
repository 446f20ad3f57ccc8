// CudaKernels loads noria's kernels on one device, and launches them.
//
// It finds the driver's functions at first use, so a build needs no CUDA driver: in the library of the CUDA runtime,
// else in libcuda.so.1.
//
// Ownership: modules stay loaded until the process ends, because a kernel may still be running.
// Threads: any.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "device/cuda_device.h"

struct CUmod_st;  // declared by the CUDA driver
struct CUfunc_st;

namespace noria {

class CudaKernels {
 public:
  explicit CudaKernels(const CudaDevice& device);
  ~CudaKernels();
  CudaKernels(const CudaKernels&) = delete;  // others point into it
  CudaKernels& operator=(const CudaKernels&) = delete;

  /// Loads the kernels. Returns the reason if that fails, else an empty string. The device is current on the calling
  /// thread.
  std::string absent();
  /// Launches `num_threads` threads, rounded up to blocks of 256, and at most 16384 blocks: kernels loop over the rest.
  /// `parameters` point to the arguments. Throws MachineError if the driver refuses it, or if there are no kernels.
  void launch(const std::string& name, std::int64_t num_threads, const std::vector<void*>& parameters,
              cuda::StreamHandle stream);

 private:
  struct Driver;
  std::string load() NORIA_REQUIRES(mutex_);
  CUfunc_st* function(const std::string& name) NORIA_REQUIRES(mutex_);

  const CudaDevice& device_;
  Mutex mutex_;
  bool is_loaded_ NORIA_GUARDED_BY(mutex_) = false;
  std::string absent_ NORIA_GUARDED_BY(mutex_);
  std::unique_ptr<const Driver> driver_ NORIA_GUARDED_BY(mutex_);
  std::vector<CUmod_st*> modules_ NORIA_GUARDED_BY(mutex_);
  std::map<std::string, CUfunc_st*> functions_ NORIA_GUARDED_BY(mutex_);
};

}  // namespace noria
