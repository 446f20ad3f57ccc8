#include "allocator.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <unistd.h>

#include "faults.h"
#include "settings.h"

namespace pretend_gpu {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kSmallest = 512;  // all sizes are multiples of it
constexpr std::size_t kSmall = kMiB;    // the largest block of a small segment
constexpr std::size_t kSmallSegment = 2 * kMiB;
constexpr std::size_t kOwnSegment = 10 * kMiB;  // from here on a block has a segment of its own
constexpr std::size_t kLargeSegment = 20 * kMiB;
constexpr std::size_t kRoundLarge = 2 * kMiB;

std::size_t round_up(std::size_t size, std::size_t to) { return (size + to - 1) / to * to; }

std::size_t block_size(std::size_t size) { return std::max(round_up(size, kSmallest), kSmallest); }

std::size_t segment_size(std::size_t size) {
  if (size <= kSmall) return kSmallSegment;
  return size < kOwnSegment ? kLargeSegment : round_up(size, kRoundLarge);
}

std::string text_of(std::size_t size) {
  std::array<char, 64> text{};
  if (size <= 1024) std::snprintf(text.data(), text.size(), "%zu bytes", size);
  else if (size <= kMiB) std::snprintf(text.data(), text.size(), "%.2f KiB", static_cast<double>(size) / 1024.0);
  else if (size <= 1024 * kMiB)
    std::snprintf(text.data(), text.size(), "%.2f MiB", static_cast<double>(size) / 1048576.0);
  else std::snprintf(text.data(), text.size(), "%.2f GiB", static_cast<double>(size) / 1073741824.0);
  return text.data();
}

struct Block {
  c10::StreamId stream;
  bool is_small;
  std::byte* memory;
  std::size_t size, requested = 0;
  bool is_allocated = false;
  int num_events = 0;                // of other streams that may still use it
  std::set<c10::StreamId> others{};  // those that were recorded
  Block* before = nullptr;           // its neighbours in the segment
  Block* after = nullptr;

  bool is_split() const { return before != nullptr || after != nullptr; }
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->size, a->memory) < std::tie(b->stream, b->size, b->memory);
  }
};

void release_memory(void* memory);

}  // namespace

// Never freed: who observes may be Python's, which ends first.
static std::vector<Allocator::FullObserver>* full_observers() {
  static auto* const all = new std::vector<Allocator::FullObserver>;
  return all;
}

void Allocator::tell_when_full(FullObserver observer) { full_observers()->push_back(std::move(observer)); }

class Allocator::Device {
 public:
  explicit Device(int index) : index_(index) {}

  void* take(std::size_t requested, c10::StreamId stream) {
    std::unique_lock lock(mutex_);
    finish_events(false);
    const std::size_t size = block_size(requested);
    Block* block = take_idle(size, stream);
    if (block == nullptr) block = new_segment(size, stream);
    if (block == nullptr) {
      ++stats_.num_alloc_retries;
      release_idle();
      block = new_segment(size, stream);
    }
    if (block == nullptr) {
      ++stats_.num_ooms;
      refuse(segment_size(size), std::move(lock));
    }
    split(*block, size);
    block->is_allocated = true;
    block->requested = requested;
    allocated_[block->memory] = block;
    count(*block, &Stats::allocation, 1);
    count(*block, &Stats::allocated_bytes, block->size);
    count(*block, &Stats::requested_bytes, requested);
    count(*block, &Stats::active, 1);
    count(*block, &Stats::active_bytes, block->size);
    if (settings().poison) overwrite(*block);
    return block->memory;
  }

  /// False: not ours.
  bool give_back(void* memory) {
    const std::lock_guard lock(mutex_);
    const auto found = allocated_.find(memory);
    if (found == allocated_.end()) return false;
    Block& block = *found->second;
    allocated_.erase(found);
    block.is_allocated = false;
    uncount(block, &Stats::allocation, 1);
    uncount(block, &Stats::allocated_bytes, block.size);
    uncount(block, &Stats::requested_bytes, block.requested);
    if (block.others.empty()) {
      make_idle(block);
      return true;
    }
    for (const c10::StreamId id : block.others) {
      cudaEvent_t event = make_event(index_);
      record_event(event, stream_of(id));
      ++block.num_events;
      events_[id].emplace_back(event, &block);
    }
    block.others.clear();
    return true;
  }

  void record(void* memory, c10::StreamId stream) {
    const std::lock_guard lock(mutex_);
    const auto found = allocated_.find(memory);
    if (found != allocated_.end() && found->second->stream != stream) found->second->others.insert(stream);
  }

  void empty() {
    const std::lock_guard lock(mutex_);
    release_idle();
  }

  c10::CachingDeviceAllocator::DeviceStats stats() const {
    const std::lock_guard lock(mutex_);
    return stats_;
  }

  template <class Reset>
  void reset(const Reset& one) {
    const std::lock_guard lock(mutex_);
    for (auto* each :
         {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.inactive_split, &stats_.allocated_bytes,
          &stats_.reserved_bytes, &stats_.active_bytes, &stats_.inactive_split_bytes, &stats_.requested_bytes}) {
      for (auto& stat : *each) one(stat);
    }
  }
  void reset_counts() {
    const std::lock_guard lock(mutex_);
    stats_.num_alloc_retries = stats_.num_ooms = stats_.num_sync_all_streams = 0;
    stats_.num_device_alloc = stats_.num_device_free = 0;
  }

  void describe(int fd, const void* address) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    const auto* at = static_cast<const std::byte*>(address);
    for (const auto& [memory, block] : allocated_) {
      if (at < block->memory || at >= block->memory + block->size) continue;
      dprintf(fd, "  byte %zu of a block of %zu bytes that torch's allocator gave out on stream %lld of cuda:%d\n",
              static_cast<std::size_t>(at - block->memory), block->requested, static_cast<long long>(block->stream),
              index_);
    }
  }

  double fraction = 1.0;  // written under no lock: a test sets it between two others

 private:
  using Stats = c10::CachingDeviceAllocator::DeviceStats;
  using StatArray = c10::CachingAllocator::StatArray;

  c10::Stream stream_of(c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, device_of(index_), id); }

  template <class Change>
  void each_stat(const Block& block, StatArray Stats::* which, const Change& change) {
    change((stats_.*which)[0]);
    change((stats_.*which)[block.is_small ? 1 : 2]);
  }
  void count(const Block& block, StatArray Stats::* which, std::size_t amount) {
    each_stat(block, which, [&](auto& stat) { stat.increase(amount); });
  }
  void uncount(const Block& block, StatArray Stats::* which, std::size_t amount) {
    each_stat(block, which, [&](auto& stat) { stat.decrease(amount); });
  }

  std::set<Block*, BySize>& idle_of(const Block& block) { return block.is_small ? small_ : large_; }

  void add_idle(Block& block) {
    idle_of(block).insert(&block);
    if (!block.is_split()) return;
    count(block, &Stats::inactive_split, 1);
    count(block, &Stats::inactive_split_bytes, block.size);
  }
  void remove_idle(Block& block) {
    idle_of(block).erase(&block);
    if (!block.is_split()) return;
    uncount(block, &Stats::inactive_split, 1);
    uncount(block, &Stats::inactive_split_bytes, block.size);
  }

  Block* take_idle(std::size_t size, c10::StreamId stream) {
    Block key{stream, size <= kSmall, nullptr, size};
    std::set<Block*, BySize>& idle = idle_of(key);
    const auto found = idle.lower_bound(&key);
    if (found == idle.end() || (*found)->stream != stream) return nullptr;
    Block* const block = *found;
    remove_idle(*block);
    return block;
  }

  Block* new_segment(std::size_t size, c10::StreamId stream) {
    const std::size_t whole = segment_size(size);
    const OnDevice on(index_);
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    const auto allowed = static_cast<std::int64_t>(fraction * static_cast<double>(total));
    if (stats_.reserved_bytes[0].current + static_cast<std::int64_t>(whole) > allowed) return nullptr;
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, whole);
    if (error == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      return nullptr;
    }
    check(error, "cudaMalloc");
    auto* block = new Block{stream, size <= kSmall, static_cast<std::byte*>(memory), whole};
    ++stats_.num_device_alloc;
    count(*block, &Stats::segment, 1);
    count(*block, &Stats::reserved_bytes, whole);
    return block;
  }

  void split(Block& block, std::size_t size) {
    const std::size_t rest = block.size - size;
    if (block.is_small ? rest < kSmallest : rest <= kSmall) return;
    auto* other = new Block{block.stream, block.is_small, block.memory + size, rest};
    other->before = &block;
    other->after = block.after;
    if (other->after != nullptr) other->after->before = other;
    block.after = other;
    block.size = size;
    add_idle(*other);
  }

  void make_idle(Block& block) {
    uncount(block, &Stats::active, 1);
    uncount(block, &Stats::active_bytes, block.size);
    for (Block* neighbour : {block.before, block.after}) join(block, neighbour);
    add_idle(block);
  }

  void join(Block& block, Block* neighbour) {
    if (neighbour == nullptr || neighbour->is_allocated || neighbour->num_events > 0) return;
    remove_idle(*neighbour);
    if (neighbour == block.before) {
      block.memory = neighbour->memory;
      block.before = neighbour->before;
      if (block.before != nullptr) block.before->after = &block;
    } else {
      block.after = neighbour->after;
      if (block.after != nullptr) block.after->before = &block;
    }
    block.size += neighbour->size;
    delete neighbour;
  }

  /// In the order of each stream; `all`: waits for them.
  void finish_events(bool all) {
    for (auto& [stream, queue] : events_) {
      while (!queue.empty()) {
        const auto [event, block] = queue.front();
        if (all) check(cudaEventSynchronize(event), "cudaEventSynchronize");
        else if (!has_passed(event)) break;
        check(cudaEventDestroy(event), "cudaEventDestroy");
        queue.pop_front();
        if (--block->num_events == 0) make_idle(*block);
      }
    }
  }

  void release_idle() {
    ++stats_.num_sync_all_streams;
    finish_events(true);
    const OnDevice on(index_);
    for (auto* idle : {&small_, &large_}) {
      for (auto it = idle->begin(); it != idle->end();) {
        Block* const block = *it;
        if (block->is_split()) {
          ++it;
          continue;
        }
        it = idle->erase(it);
        check(cudaFree(block->memory), "cudaFree");
        ++stats_.num_device_free;
        uncount(*block, &Stats::segment, 1);
        uncount(*block, &Stats::reserved_bytes, block->size);
        delete block;
      }
    }
  }

  void overwrite(const Block& block) const {
    run_for_free_on(stream_of(block.stream), [memory = block.memory, size = block.size] {
      if (void* const reached = fake_cuda::reach(memory, size)) std::memset(reached, 0xFF, size);
    });
  }

  [[noreturn]] void refuse(std::size_t size, std::unique_lock<std::mutex> lock) const {
    const OnDevice on(index_);
    std::size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    const auto allocated = static_cast<std::size_t>(stats_.allocated_bytes[0].current);
    const auto reserved = static_cast<std::size_t>(stats_.reserved_bytes[0].current);
    const std::string allowed =
        fraction < 1.0
            ? c10::str(text_of(static_cast<std::size_t>(fraction * static_cast<double>(total))), " allowed; ")
            : "";
    lock.unlock();  // who observes may ask this allocator, or wait for a thread that does
    for (const Allocator::FullObserver& observe : *full_observers()) observe(index_, size, reserved, free);
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", text_of(size), ". GPU ", index_,
        " has a total capacity of ", text_of(total), " of which ", text_of(free),
        " is free. Including non-PyTorch memory, this process has ", text_of(total - free), " memory in use. ", allowed,
        "Of the allocated memory ", text_of(allocated), " is allocated by PyTorch, and ", text_of(reserved - allocated),
        " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)");
  }

  const int index_;
  mutable std::mutex mutex_;  // protects all below
  std::set<Block*, BySize> small_, large_;
  std::unordered_map<void*, Block*> allocated_;
  std::map<c10::StreamId, std::deque<std::pair<cudaEvent_t, Block*>>> events_;
  Stats stats_;
};

namespace {

std::array<Allocator::Device*, fake_cuda::kNumDevices> all_devices{};

void release_memory(void* memory) {
  for (Allocator::Device* device : all_devices) {
    if (device->give_back(memory)) return;
  }
}

void describe(int fd, const void* address) {
  for (Allocator::Device* device : all_devices) device->describe(fd, address);
}

}  // namespace

Allocator::Allocator() {
  for (int index = 0; index < fake_cuda::kNumDevices; ++index) {
    devices_[index] = std::make_unique<Device>(index);
    all_devices.at(static_cast<std::size_t>(index)) = devices_[index].get();
  }
  fake_cuda::describe_further_by(&describe);
}

Allocator::~Allocator() = default;

Allocator::Device& Allocator::of(int device) const {
  TORCH_CHECK(device >= 0 && device < fake_cuda::kNumDevices, "Invalid device argument ", device,
              ": did you call init?");
  return *devices_[device];
}

c10::DataPtr Allocator::allocate(std::size_t num_bytes) {
  const c10::Stream stream = current_stream(-1);
  if (num_bytes == 0) return {nullptr, stream.device()};
  void* const memory = of(stream.device_index()).take(num_bytes, stream.id());
  return {memory, memory, &release_memory, stream.device()};
}

c10::DeleterFnPtr Allocator::raw_deleter() const { return &release_memory; }

void Allocator::copy_data(void* to, const void* from, std::size_t num_bytes) const {
  const OnDevice on(current_device());
  check(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToDevice, native(current_stream(-1))), "cudaMemcpyAsync");
}

void Allocator::emptyCache(c10::MempoolId_t) {
  for (const auto& device : devices_) device->empty();
}

void Allocator::recordStream(const c10::DataPtr& memory, c10::Stream stream) {
  if (memory.get() == nullptr || memory.get_deleter() != &release_memory)
    return;  // as torch's: others' is not followed
  of(memory.device().index()).record(memory.get(), stream.id());
}

c10::CachingDeviceAllocator::DeviceStats Allocator::getDeviceStats(c10::DeviceIndex device) {
  return of(device).stats();
}

void Allocator::resetAccumulatedStats(c10::DeviceIndex device) {
  of(device).reset([](auto& stat) { stat.reset_accumulated(); });
  of(device).reset_counts();
}

void Allocator::resetPeakStats(c10::DeviceIndex device) {
  of(device).reset([](auto& stat) { stat.reset_peak(); });
}

std::pair<std::size_t, std::size_t> Allocator::getMemoryInfo(c10::DeviceIndex device) {
  const OnDevice on(device);
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return {free, total};
}

void Allocator::set_fraction(int device, double fraction) { of(device).fraction = fraction; }
double Allocator::fraction(int device) const { return of(device).fraction; }

Allocator& allocator() {
  static auto* the_allocator = new Allocator;
  return *the_allocator;
}

namespace {
[[maybe_unused]] const bool is_set = [] {
  c10::SetAllocator(kDevice, &allocator());
  return true;
}();
}  // namespace

}  // namespace pretend_gpu
