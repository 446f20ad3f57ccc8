// Maps whole pages, with the alignment of device memory.
//
// Ownership: the caller owns the pages from `map_pages` or `map_shared_pages` to `unmap_pages` with the same size. The
//   caller owns a descriptor too, and closes it separately. The kernel frees shared pages when no process maps them or
//   holds a descriptor. So a killed process leaves nothing behind.
#pragma once

#include <cstddef>

#include "base/bytes.h"

namespace noria {

inline constexpr Bytes kDeviceAlignment{std::int64_t{2} << 20};

/// Returns zeroed memory, aligned to kDeviceAlignment, in whole pages. Returns null if the kernel refuses; see errno.
std::byte* map_pages(Bytes bytes);

/// Returns a descriptor of new zeroed pages, which all its holders share. Returns -1 if the kernel refuses; see errno.
int make_shared_pages(Bytes bytes);
/// Returns the whole pages of a range to the kernel; processes that map them then read zeros. Returns how many bytes
/// were freed: 0 if the kernel refuses.
Bytes discard_pages(int fd, Bytes offset, Bytes bytes);
/// Maps the pages of a descriptor, with the same alignment and size. Returns null if the kernel refuses; see errno.
std::byte* map_shared_pages(int fd, Bytes bytes);
/// Takes pages that lie side by side in the machine's memory, 2 MiB each, for as much of mapped memory as the kernel
/// can give. A disk gets such memory in fewer pieces. Nothing else changes.
void join_pages(std::byte* memory, Bytes bytes);

void unmap_pages(std::byte* memory, Bytes bytes);

/// Gives back to the kernel what this process has freed. Otherwise glibc may keep blocks of up to 32 MiB, so that a
/// model whose tensors are freed would still take memory.
void return_freed_memory();

}  // namespace noria
