// Pinned host memory, as torch's caching host allocator gives it out.
//
// Ownership: what is freed is kept, pinned, and given out again for requests of the same size (rounded up to a power of
//   two) once the streams that copy from or to it have passed; they are noted by `used_on`. Threads: any.
#pragma once

#include <c10/core/Allocator.h>

#include "streams.h"

namespace pretend_gpu {

c10::Allocator& pinned_allocator();

/// As CUDA sees it: registered by anybody, noria for instance.
bool is_pinned(const void* memory);

/// A copy on this stream uses it, behind the host's back.
void used_on(const void* memory, const c10::Stream& stream);

/// What is idle is given back.
void empty_pinned();

}  // namespace pretend_gpu
