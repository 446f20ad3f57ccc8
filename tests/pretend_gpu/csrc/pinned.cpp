#include "pinned.h"

#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

namespace pretend_gpu {
namespace {

constexpr std::size_t kPage = 4096;

struct Block {
  std::byte* memory;
  std::size_t size;
  std::unordered_set<c10::Stream> streams;  // which use it, while it is allocated
  std::vector<cudaEvent_t> events;          // of these streams, from when it was released
};

struct State {
  std::mutex mutex;
  std::map<const std::byte*, Block> allocated;
  std::multimap<std::size_t, Block> idle;
};

State& state() {
  static State* the_state = new State;  // outlives static objects that have pinned memory
  return *the_state;
}

bool is_passed(Block& block) {
  while (!block.events.empty()) {
    if (!has_passed(block.events.back())) return false;
    check(cudaEventDestroy(block.events.back()), "cudaEventDestroy");
    block.events.pop_back();
  }
  return true;
}

void release_pinned(void* memory) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  auto found = s.allocated.find(static_cast<std::byte*>(memory));
  if (found == s.allocated.end()) return;
  Block& block = found->second;
  for (const c10::Stream& stream : std::exchange(block.streams, {})) {
    block.events.push_back(make_event(stream.device_index()));
    record_event(block.events.back(), stream);
  }
  const std::size_t size = block.size;
  s.idle.emplace(size, std::move(block));
  s.allocated.erase(found);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t num_bytes) override {
    if (num_bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    const std::size_t size = std::max(std::bit_ceil(num_bytes), kPage);
    State& s = state();
    const std::lock_guard lock(s.mutex);
    const auto [first, last] = s.idle.equal_range(size);
    for (auto it = first; it != last; ++it) {
      if (!is_passed(it->second)) continue;
      std::byte* const memory = it->second.memory;
      s.allocated.emplace(memory, std::move(it->second));
      s.idle.erase(it);
      return {memory, memory, &release_pinned, c10::Device(c10::kCPU)};
    }
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(kPage, size));
    TORCH_CHECK(memory != nullptr, "pinning ", size, " bytes failed: out of memory");
    check(cudaHostRegister(memory, size, cudaHostRegisterPortable), "cudaHostAlloc");
    s.allocated.emplace(memory, Block{memory, size, {}, {}});
    return {memory, memory, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};

}  // namespace

c10::Allocator& pinned_allocator() {
  static auto* the_allocator = new PinnedAllocator;
  return *the_allocator;
}

bool is_pinned(const void* memory) { return fake_cuda::locate(memory, 1).kind == fake_cuda::Place::Kind::registered; }

void used_on(const void* memory, const c10::Stream& stream) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  auto found = s.allocated.upper_bound(static_cast<const std::byte*>(memory));
  if (found == s.allocated.begin()) return;
  Block& block = (--found)->second;
  if (static_cast<const std::byte*>(memory) >= block.memory + block.size) return;
  block.streams.insert(stream);
}

void empty_pinned() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  for (auto it = s.idle.begin(); it != s.idle.end();) {
    if (!is_passed(it->second)) {
      ++it;
      continue;
    }
    check(cudaHostUnregister(it->second.memory), "cudaFreeHost");
    std::free(it->second.memory);
    it = s.idle.erase(it);
  }
}

}  // namespace pretend_gpu
