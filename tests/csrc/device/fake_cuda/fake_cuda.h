// What a test can do to the fake CUDA runtime: hold streams, inject errors, count calls, set its pace and its size.
//
// The fake keeps CUDA's rules where breaking them would go unnoticed on a device: a stream that is told to wait for an
// event captures the event's last record at that moment, and an event that was never recorded is passed; recording
// again re-arms; a query of what is not done leaves cudaErrorNotReady behind as the thread's last error; events and
// streams belong to the device that was current when they were made, and recording one in a stream of another device
// is an error; freeing memory waits for the device; a stream holds 1,024 launches, and who launches one more waits. It
// is stricter than CUDA in one thing: an asynchronous copy must have registered host memory, all in one range, on its
// host side, and device memory of the stream's own device on the other, or on both; memory that was opened counts as
// that of the device that was current then. It does not model two things: a real runtime refuses to open a handle in
// the process that it comes from, and the legacy default stream waits for streams that were not made to be
// non-blocking. Here as there, what is opened twice has one address and is closed twice.
//
// Device memory is cut from one memfd for each device, and a handle says where in which process's: so it can be opened
// by any process of the same user, while the exporting one lives. See memory.h, and stream.h for how streams go.
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
inline constexpr std::size_t kMostDeviceMemory = kDeviceMemory << 4;  // what `set_capacity` can give a device

/// The `nth` call from now (1: the next) of this name fails so, once.
void fail_next(const std::string& call, int nth, cudaError_t error);

/// How often each call was made since `reset`, and their names in order.
std::map<std::string, std::int64_t> counts();
std::vector<std::string> log();
/// Forgets counts, log, errors, held copies and registrations (whose memory may be gone after a failed test); device
/// memory, streams and events stay.
void reset();

/// How many streams were told to wait for an event that was never recorded: no error, and no wait either.
std::int64_t num_empty_waits();

/// How many objects of each kind are alive now.
std::map<std::string, std::int64_t> alive();

/// The calling thread's pending error, left where it is.
cudaError_t pending_error();

/// A stream of the calling thread's device, as a user of CUDA would make one. `is_patient`: see stream.h.
cudaStream_t make_stream(bool is_patient = false);

/// As torch.cuda.graph: the calling thread captures the stream, in mode "global".
void begin_capture(cudaStream_t stream);
/// False: some call has broken it.
bool end_capture();

/// The next copy to this address waits for `until` first, and with it all that comes later on its stream.
void hold_copy(const void* to, std::function<void()> until);
/// As a kernel; an error if there is no such stream. The default stream is that of the calling thread's device.
cudaError_t run_on(cudaStream_t stream, std::function<void()> work);
/// Without taking a slot of the launch queue: what a real device would not have to be told.
void run_for_free_on(cudaStream_t stream, std::function<void()> work);

// ---- for tests/pretend_gpu, where torch's kernels run on this machine too ----

/// Streams do nothing until a thread waits for them, or run as soon as they can.
void set_lazy(bool is_lazy);
/// Kernels and copies start late, at random, `percent` of them.
void set_delays(std::uint64_t seed, std::int64_t max_delay_us, int percent);
/// Threads that only watch: see stream.h.
void set_observers(std::vector<std::string> names);
/// As when a process ends: streams drop what they have, and no thread waits any more. There is no way back.
void stop();

/// Device memory may not be touched but by streams, from now on; before the first allocation.
void protect_memory();
/// How much a device has, for allocations to come.
void set_capacity(int device, std::size_t num_bytes);

/// What lies at an address.
struct Place {
  enum class Kind { unknown, allocated, opened, registered } kind = Kind::unknown;
  int device = -1;  // that was current when it was allocated, opened or registered
  std::byte* begin = nullptr;
  std::size_t size = 0;
};
/// Unknown, if not all of [memory, memory + size) lies in one range.
Place locate(const void* memory, std::size_t size);
/// For work that runs on a stream: where it can touch these bytes. Null: a device cannot reach them.
void* reach(const void* memory, std::size_t size);

/// Something went wrong on a device: calls that wait, or queue copies, return this from now on.
void set_sticky_error(cudaError_t error);
/// Only this one: another that is pending stays.
void clear_sticky_error(cudaError_t error);

/// How often a host thread waited for the device, or because a launch queue was full.
std::int64_t num_host_waits();
std::int64_t num_full_queues();
void reset_waits();

}  // namespace fake_cuda
