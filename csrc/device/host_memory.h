// Exactly sized pages from the kernel, aligned as a device aligns its memory.
//
// Ownership: the caller's, from `map_pages` to `unmap_pages` with the same size.
#pragma once

#include <cstddef>

#include "base/bytes.h"

namespace noria {

inline constexpr Bytes kDeviceAlignment{std::int64_t{2} << 20};

/// Zeroed memory, aligned to kDeviceAlignment, sized up to whole pages. Null when the kernel refuses; errno says why.
std::byte* map_pages(Bytes bytes);
void unmap_pages(std::byte* memory, Bytes bytes);

}  // namespace noria
