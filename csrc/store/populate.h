// Takes the pages of a range before anything needs them: in parallel, slice by slice, interruptible.
//
// A page is zeroed by whoever first writes it, one fault after the other; several threads zero at the bandwidth of the
// memory instead, and where the machine is short of it, that is known before training begins.
//
// Order: what the range already holds is kept. Threads: its own, as many as the process may use CPUs and no more; no
//   other thread may write the range meanwhile. The calling thread only looks on.
#pragma once

#include <cstddef>
#include <functional>

#include "base/bytes.h"

namespace noria {

/// Told some times a second and once at the end, on the calling thread, how much is populated. May throw: population
/// stops within a slice a thread.
using OnPopulated = std::function<void(Bytes populated)>;

struct PopulateOptions {
  int num_threads = 0;     // 0: one for each CPU that the process may use, up to 16
  bool ask_kernel = true;  // false: touch every page, as where the kernel has no MADV_POPULATE_WRITE (before 5.14)
};

/// Throws MachineError when the machine has no more pages, and what `told` throws. What was taken until then stays with
/// the range. A range of one slice is taken by the calling thread.
void populate(std::byte* data, Bytes bytes, const OnPopulated& told = {}, PopulateOptions options = {});

/// What one thread takes at a time. Measured on two cores under other load (docs/memory.md): threads that take smaller
/// slices finish together, larger ones wait for the last.
inline constexpr Bytes kPopulateSlice{std::int64_t{8} << 20};

/// CPUs that this thread, and so the threads it makes, may run on.
int num_usable_cpus();

}  // namespace noria
