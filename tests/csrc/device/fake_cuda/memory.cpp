#include "memory.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace fake_cuda {
namespace {

constexpr std::size_t kPage = 4096;
std::size_t whole_pages(std::size_t size) { return (size + kPage - 1) / kPage * kPage; }

/// What a cudaIpcMemHandle_t holds, without gaps: handles are compared.
struct Told {
  pid_t pid;
  int fd;
  std::size_t offset, size;
};
static_assert(sizeof(Told) == 2 * sizeof(int) + 2 * sizeof(std::size_t));

std::byte* map(int fd, std::size_t size, std::size_t offset, int protection) {
  void* memory = mmap(nullptr, size, protection, MAP_SHARED | MAP_NORESERVE, fd, static_cast<off_t>(offset));
  return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
}

}  // namespace

Memory& memory() {
  static Memory* the_memory = new Memory;
  return *the_memory;
}

void Memory::protect() {
  const std::lock_guard lock(mutex_);
  for (const Block& block : blocks_) {
    if (block.seen != nullptr && !is_protected_) std::abort();  // there are addresses already that the host may touch
  }
  is_protected_ = true;
}

void Memory::set_capacity(int device, std::size_t num_bytes) {
  const std::lock_guard lock(mutex_);
  blocks_[device].capacity = num_bytes < kMostDeviceMemory ? num_bytes : kMostDeviceMemory;
}

std::size_t Memory::capacity(int device) const {
  const std::shared_lock lock(mutex_);
  return blocks_[device].capacity;
}

std::size_t Memory::used(int device) const {
  const std::shared_lock lock(mutex_);
  return blocks_[device].used;
}

/// Caller holds the mutex, as in all that is private.
Memory::Block& Memory::mapped(int device) {
  Block& block = blocks_[device];
  if (block.seen != nullptr) return block;
  block.fd = memfd_create("fake_cuda", MFD_CLOEXEC);
  if (ftruncate(block.fd, kMostDeviceMemory) != 0) std::abort();
  block.seen = map(block.fd, kMostDeviceMemory, 0, is_protected_ ? PROT_NONE : PROT_READ | PROT_WRITE);
  block.own = is_protected_ ? map(block.fd, kMostDeviceMemory, 0, PROT_NONE) : block.seen;
  if (block.seen == nullptr || block.own == nullptr) std::abort();
  return block;
}

const std::pair<const std::byte* const, Memory::Range>* Memory::holder(const Ranges& ranges, const void* memory,
                                                                       std::size_t size) {
  const auto* start = static_cast<const std::byte*>(memory);
  auto found = ranges.upper_bound(start);
  if (found == ranges.begin()) return nullptr;
  --found;
  return start + size <= found->first + found->second.size ? &*found : nullptr;
}

/// The first gap that is large enough, or null.
std::byte* Memory::gap(int device, std::size_t size) {
  std::byte* const first = mapped(device).seen;
  std::byte* begin = first;
  for (auto it = allocated_.lower_bound(first); it != allocated_.end(); ++it) {
    if (it->second.device != device || begin + size <= it->first) break;
    begin = first + (it->first - first) + whole_pages(it->second.size);
  }
  return begin + size <= first + kMostDeviceMemory ? begin : nullptr;
}

cudaError_t Memory::allocate(int device, std::size_t size, void** memory) {
  const std::lock_guard lock(mutex_);
  Block& block = mapped(device);
  if (block.used + size > block.capacity) return cudaErrorMemoryAllocation;
  std::byte* const begin = gap(device, size);
  if (begin == nullptr) return cudaErrorMemoryAllocation;
  const std::ptrdiff_t to_own = block.own - block.seen;
  if (is_protected_) mprotect(begin + to_own, whole_pages(size), PROT_READ | PROT_WRITE);
  block.used += size;
  allocated_[begin] = {size, device, to_own};
  *memory = begin;
  return cudaSuccess;
}

cudaError_t Memory::free(void* memory) {
  const std::lock_guard lock(mutex_);
  const auto found = allocated_.find(static_cast<std::byte*>(memory));
  if (found == allocated_.end()) return cudaErrorInvalidValue;
  const auto [size, device, to_own] = found->second;
  blocks_[device].used -= size;
  std::byte* const own = static_cast<std::byte*>(memory) + to_own;
  madvise(own, whole_pages(size), MADV_REMOVE);
  if (is_protected_) mprotect(own, whole_pages(size), PROT_NONE);
  allocated_.erase(found);
  return cudaSuccess;
}

std::optional<int> Memory::device_of(void* memory) const {
  const std::shared_lock lock(mutex_);
  const auto found = allocated_.find(static_cast<std::byte*>(memory));
  return found == allocated_.end() ? std::nullopt : std::optional(found->second.device);
}

cudaError_t Memory::tell(void* memory, cudaIpcMemHandle_t& handle) const {
  const std::shared_lock lock(mutex_);
  const auto found = allocated_.find(static_cast<std::byte*>(memory));
  if (found == allocated_.end()) return cudaErrorInvalidValue;
  const Block& block = blocks_[found->second.device];
  const Told told{getpid(), block.fd, static_cast<std::size_t>(found->first - block.seen), found->second.size};
  handle = {};
  std::memcpy(&handle, &told, sizeof(told));
  return cudaSuccess;
}

cudaError_t Memory::open(int device, const cudaIpcMemHandle_t& handle, void** memory) {
  const std::lock_guard lock(mutex_);
  for (auto& [address, opened] : opened_) {
    if (std::memcmp(&opened.handle, &handle, sizeof(handle)) != 0 || opened_ranges_.at(address).device != device) {
      continue;
    }
    ++opened.times;
    *memory = const_cast<std::byte*>(address);
    return cudaSuccess;
  }
  Told told{};
  std::memcpy(&told, &handle, sizeof(told));
  const std::string path = "/proc/" + std::to_string(told.pid) + "/fd/" + std::to_string(told.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return cudaErrorMapBufferObjectFailed;
  const std::size_t size = whole_pages(told.size);
  std::byte* const own = map(fd, size, told.offset, PROT_READ | PROT_WRITE);
  std::byte* const seen = is_protected_ ? map(fd, size, told.offset, PROT_NONE) : own;
  ::close(fd);
  if (own == nullptr || seen == nullptr) return cudaErrorMapBufferObjectFailed;
  opened_[seen] = {handle, 1};
  opened_ranges_[seen] = {told.size, device, own - seen};
  *memory = seen;
  return cudaSuccess;
}

cudaError_t Memory::close(int device, void* memory) {
  const std::lock_guard lock(mutex_);
  const auto found = opened_.find(static_cast<std::byte*>(memory));
  if (found == opened_.end()) return cudaErrorInvalidValue;
  const Range range = opened_ranges_.at(found->first);
  if (range.device != device) return cudaErrorInvalidValue;
  if (--found->second.times > 0) return cudaSuccess;
  if (range.to_own != 0) munmap(static_cast<std::byte*>(memory) + range.to_own, whole_pages(range.size));
  munmap(memory, whole_pages(range.size));
  opened_ranges_.erase(found->first);
  opened_.erase(found);
  return cudaSuccess;
}

cudaError_t Memory::add_registered(int device, void* memory, std::size_t size) {
  const std::lock_guard lock(mutex_);
  if (memory == nullptr || size == 0) return cudaErrorInvalidValue;
  const auto* start = static_cast<const std::byte*>(memory);
  for (const auto& [other, range] : registered_) {
    if (start < other + range.size && other < start + size) return cudaErrorHostMemoryAlreadyRegistered;
  }
  registered_[start] = {size, device};
  return cudaSuccess;
}

cudaError_t Memory::remove_registered(void* memory) {
  const std::lock_guard lock(mutex_);
  return registered_.erase(static_cast<std::byte*>(memory)) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}

void Memory::forget_registered() {
  const std::lock_guard lock(mutex_);
  registered_.clear();
}

Place Memory::locate(const void* memory, std::size_t size) const {
  const std::shared_lock lock(mutex_);
  const auto as = [](Place::Kind kind, const auto* found) {
    return Place{kind, found->second.device, const_cast<std::byte*>(found->first), found->second.size};
  };
  if (const auto* found = holder(allocated_, memory, size)) return as(Place::Kind::allocated, found);
  if (const auto* found = holder(opened_ranges_, memory, size)) return as(Place::Kind::opened, found);
  if (const auto* found = holder(registered_, memory, size)) return as(Place::Kind::registered, found);
  return {};
}

void* Memory::reach(const void* memory, std::size_t size) const {
  const std::shared_lock lock(mutex_);
  for (const Ranges* ranges : {&allocated_, &opened_ranges_, &registered_}) {
    const auto* found = holder(*ranges, memory, size);
    if (found != nullptr) return const_cast<std::byte*>(static_cast<const std::byte*>(memory)) + found->second.to_own;
  }
  return nullptr;
}

std::int64_t Memory::num_allocations() const {
  const std::shared_lock lock(mutex_);
  return static_cast<std::int64_t>(allocated_.size());
}

std::int64_t Memory::num_registered() const {
  const std::shared_lock lock(mutex_);
  return static_cast<std::int64_t>(registered_.size());
}

std::int64_t Memory::num_opened() const {
  const std::shared_lock lock(mutex_);
  return static_cast<std::int64_t>(opened_.size());
}

bool Memory::describe(int fd, const void* address) const {
  const std::shared_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    dprintf(fd, "  (where it lies is not told: its tables were being changed)\n");
    return false;
  }
  const auto* at = static_cast<const std::byte*>(address);
  const auto tell = [&](const char* what, const Ranges& ranges) {
    for (const auto& [begin, range] : ranges) {
      for (const std::ptrdiff_t to : {std::ptrdiff_t{0}, range.to_own}) {
        if (at < begin + to || at >= begin + to + range.size) continue;
        dprintf(fd, "  byte %zu of %zu bytes %s cuda:%d at %p%s\n", static_cast<std::size_t>(at - begin - to),
                range.size, what, range.device, static_cast<const void*>(begin),
                to == 0 ? "" : ", as its streams see it");
        return true;
      }
    }
    return false;
  };
  if (tell("allocated on", allocated_) || tell("opened on", opened_ranges_)) return true;
  for (int device = 0; device < kNumDevices; ++device) {
    const Block& block = blocks_[device];
    for (const std::byte* begin : {block.seen, block.own}) {
      if (begin == nullptr || at < begin || at >= begin + kMostDeviceMemory) continue;
      dprintf(fd, "  memory of cuda:%d that is not allocated: never, or freed, or beyond the end of what lies below\n",
              device);
      return true;
    }
  }
  return false;
}

}  // namespace fake_cuda
