// Exactly sized pages from the kernel, aligned as a device aligns its memory.
//
// Ownership: the caller's, from `map_pages` or `map_shared_pages` to `unmap_pages` with the same size; a descriptor is
//   the caller's too, to be closed apart. The kernel takes shared pages back when nobody maps them and nobody has a
//   descriptor: a killed process leaves nothing behind.
#pragma once

#include <cstddef>

#include "base/bytes.h"

namespace noria {

inline constexpr Bytes kDeviceAlignment{std::int64_t{2} << 20};

/// Zeroed memory, aligned to kDeviceAlignment, sized up to whole pages. Null when the kernel refuses; errno says why.
std::byte* map_pages(Bytes bytes);

/// A descriptor of new zeroed pages for all who have it; -1 when the kernel refuses; errno says why.
int make_shared_pages(Bytes bytes);
/// Gives the whole pages of a range back to the kernel; who maps them finds zeros. How much: nothing where it refuses.
Bytes discard_pages(int fd, Bytes offset, Bytes bytes);
/// The pages behind a descriptor, aligned and sized likewise. Null when the kernel refuses; errno says why.
std::byte* map_shared_pages(int fd, Bytes bytes);

void unmap_pages(std::byte* memory, Bytes bytes);

}  // namespace noria
