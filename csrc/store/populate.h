// Takes the pages of a range before they are needed: in parallel, slice by slice, interruptible.
//
// The first write to a page zeroes it, one fault after the other. Several threads zero pages at the bandwidth of the
// memory instead. If the machine is short of memory, this shows before training begins.
//
// Order: what the range already holds is kept. Threads: its own, by default one for each CPU that the process may use,
// up to 16. No other thread may write the range meanwhile. The calling thread only waits, except for a range of one
// slice.
#pragma once

#include <cstddef>
#include <functional>

#include "base/bytes.h"

namespace noria {

/// Called on the calling thread, several times a second and once at the end, with how much is populated. It may throw:
/// then each thread stops after its current slice.
using OnPopulated = std::function<void(Bytes populated)>;

struct PopulateOptions {
  int num_threads = 0;     // 0: one for each CPU that the process may use, up to 16
  bool ask_kernel = true;  // false: touch every page, as if the kernel had no MADV_POPULATE_WRITE (before 5.14)
};

/// Throws MachineError if the machine has no more pages, and passes on what `told` throws. Pages taken until then stay
/// with the range. The calling thread takes a range of one slice itself.
void populate(std::byte* data, Bytes bytes, const OnPopulated& told = {}, PopulateOptions options = {});

/// Says how many bytes a thread takes at a time. Measured on two cores under other load (docs/memory.md): with smaller
/// slices threads finish together, with larger ones they wait for the last.
inline constexpr Bytes kPopulateSlice{std::int64_t{8} << 20};

/// Returns how many CPUs this thread, and each that it makes, may run on.
int num_usable_cpus();

}  // namespace noria
