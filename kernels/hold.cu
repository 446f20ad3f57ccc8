// Holds a stream for a given time by the device's own clock.
//
// Used by the hostile setting and by the contract suite on a real device: whatever comes later on the stream comes
// late, while the host runs ahead. It occupies one thread of one multiprocessor and touches no memory.
#include <cstdint>

namespace noria {

namespace {

__device__ std::int64_t global_time_ns() {
  std::int64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void hold(std::int64_t ns) {
  const std::int64_t end_ns = global_time_ns() + ns;
  while (global_time_ns() < end_ns) __nanosleep(1000);
}

}  // namespace

/// Queues the hold on `stream` (a cudaStream_t of the current device) and returns; a launch that fails leaves its
/// error to cudaGetLastError.
void hold_stream(void* stream, std::int64_t us) { hold<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(us * 1000); }

}  // namespace noria
