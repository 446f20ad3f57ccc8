// What a test can do to the fake CUDA runtime: hold streams, inject errors, count calls.
//
// The fake keeps CUDA's rules where breaking them would go unnoticed on a device: a stream that is told to wait for an
// event captures the event's last record at that moment, and an event that was never recorded is passed; recording
// again re-arms; a query of what is not done leaves cudaErrorNotReady behind as the thread's last error; events and
// streams belong to the device that was current when they were made, and recording one in a stream of another device
// is an error. It is stricter than CUDA in one thing: an asynchronous copy must have registered host memory, all in
// one range, on its host side, and device memory of the stream's own device on the other, or on both; memory that was
// opened counts as that of the device that was current then. It is laxer in one: a real runtime refuses to open a
// handle in the process that it comes from. Here as there, what is opened twice has one address and is closed twice.
//
// Device memory is cut from one memfd for each device, and a handle says where in which process's: so it can be opened
// by any process of the same user, while the exporting one lives.
//
// Threads: every stream is a thread. Two devices of 1 GiB each.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cuda_runtime_api.h"

namespace fake_cuda {

inline constexpr int kNumDevices = 2;
inline constexpr std::size_t kDeviceMemory = std::size_t{1} << 30;

/// The `nth` call from now (1: the next) of this name fails so, once.
void fail_next(const std::string& call, int nth, cudaError_t error);

/// How often each call was made since `reset`, and their names in order.
std::map<std::string, std::int64_t> counts();
std::vector<std::string> log();
/// Forgets counts, log, injected errors, held copies and registrations (whose memory may be gone after a failed test);
/// device memory, streams and events stay.
void reset();

/// How many streams were told to wait for an event that was never recorded: no error, and no wait either.
std::int64_t num_empty_waits();

/// Objects alive now.
struct Alive {
  std::int64_t allocations = 0, registrations = 0, streams = 0, events = 0, opened = 0;
};
Alive alive();

/// The calling thread's pending error, left where it is.
cudaError_t pending_error();

/// A stream of the calling thread's device, as a user of CUDA would make one.
cudaStream_t make_stream();

/// As torch.cuda.graph: the calling thread captures the stream, in mode "global".
void begin_capture(cudaStream_t stream);
/// False: some call has broken it.
bool end_capture();

/// The next copy to this address waits for `until` first, and with it all that comes later on its stream.
void hold_copy(const void* to, std::function<void()> until);
void run_on(cudaStream_t stream, std::function<void()> work);

}  // namespace fake_cuda
