#include "device/host_memory.h"

#include <cstdint>

#include <sys/mman.h>
#include <unistd.h>

namespace noria {

static Bytes whole_pages(Bytes bytes) { return align_up(bytes, Bytes{sysconf(_SC_PAGESIZE)}); }

std::byte* map_pages(Bytes bytes) {
  const auto size = static_cast<std::size_t>(whole_pages(bytes).count);
  const auto alignment = static_cast<std::size_t>(kDeviceAlignment.count);
  void* mapped =
      mmap(nullptr, size + alignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  // Only address space so far: what lies before and behind the aligned range goes back.
  const std::size_t before = (alignment - reinterpret_cast<std::uintptr_t>(mapped) % alignment) % alignment;
  auto* memory = static_cast<std::byte*>(mapped) + before;
  if (before > 0) munmap(mapped, before);
  munmap(memory + size, alignment - before);
  madvise(memory, size, MADV_HUGEPAGE);  // advice: refusal costs speed only
  return memory;
}

void unmap_pages(std::byte* memory, Bytes bytes) { munmap(memory, static_cast<std::size_t>(whole_pages(bytes).count)); }

}  // namespace noria
