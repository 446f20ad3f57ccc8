// What `backend.h` promises where the CUDA runtime was not found at build time.
#include "base/errors.h"
#include "device/backend.h"

namespace noria {

std::string cuda_absent_reason() {
  return "this build of noria has no CUDA part, because the CUDA runtime headers were not found when it was built";
}

std::shared_ptr<Backend> make_cuda_backend(const CudaBackendOptions& options) {
  throw MachineError("opening cuda:" + std::to_string(options.device_index) + " failed: " + cuda_absent_reason());
}

}  // namespace noria
