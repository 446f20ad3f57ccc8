#include "device/host_memory.h"

#include <cerrno>
#include <cstdint>

#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

namespace noria {

static Bytes whole_pages(Bytes bytes) { return align_up(bytes, Bytes{sysconf(_SC_PAGESIZE)}); }

// Returns aligned address space of private pages. Returns null if the kernel refuses.
static std::byte* map_aligned(std::size_t size) {
  const auto alignment = static_cast<std::size_t>(kDeviceAlignment.count);
  void* mapped =
      mmap(nullptr, size + alignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  // So far this is only address space. The parts before and behind the aligned range go back to the kernel.
  const std::size_t before = (alignment - reinterpret_cast<std::uintptr_t>(mapped) % alignment) % alignment;
  auto* memory = static_cast<std::byte*>(mapped) + before;
  if (before > 0) munmap(mapped, before);
  munmap(memory + size, alignment - before);
  return memory;
}

std::byte* map_pages(Bytes bytes) {
  const auto size = static_cast<std::size_t>(whole_pages(bytes).count);
  std::byte* memory = map_aligned(size);
  if (memory != nullptr) madvise(memory, size, MADV_HUGEPAGE);  // advice: if it is refused, only speed is lost
  return memory;
}

int make_shared_pages(Bytes bytes) {
  const int fd = memfd_create("noria", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, bytes.count) == 0) return fd;
  const int why = errno;
  close(fd);
  errno = why;
  return -1;
}

Bytes discard_pages(int fd, Bytes offset, Bytes bytes) {
  const Bytes page{sysconf(_SC_PAGESIZE)};
  const Bytes begin = whole_pages(offset), end{(offset + bytes).count / page.count * page.count};
  if (begin >= end) return {};
  const int how = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  return fallocate(fd, how, begin.count, (end - begin).count) == 0 ? end - begin : Bytes{};
}

std::byte* map_shared_pages(int fd, Bytes bytes) {
  const auto size = static_cast<std::size_t>(whole_pages(bytes).count);
  std::byte* memory = map_aligned(size);
  if (memory == nullptr) return nullptr;
  if (mmap(memory, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED) {
    madvise(memory, size, MADV_HUGEPAGE);
    return memory;
  }
  const int why = errno;
  munmap(memory, size);
  errno = why;
  return nullptr;
}

// Settings for huge pages do not matter to this call, and it does not wait for the kernel's own thread. The kernel
// joins no pages where none has been touched yet.
void join_pages(std::byte* memory, Bytes bytes) {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, of Linux 6.1; others refuse it
  const Bytes size{bytes.count / kDeviceAlignment.count * kDeviceAlignment.count};
  for (Bytes at; at < size; at += kDeviceAlignment) {
    volatile std::byte* const touched = memory + at.count;
    *touched = *touched;
  }
  if (size > Bytes{0}) madvise(memory, static_cast<std::size_t>(size.count), kCollapse);
}

void unmap_pages(std::byte* memory, Bytes bytes) { munmap(memory, static_cast<std::size_t>(whole_pages(bytes).count)); }

void return_freed_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace noria
