#include "store/populate.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/errors.h"
#include "base/mutex.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace noria {
namespace {

constexpr int kMostThreads = 16;  // a few threads already fill the memory bandwidth of a node
constexpr std::chrono::milliseconds kTold{50};

class Population {
 public:
  Population(std::byte* data, Bytes bytes, bool ask_kernel) : data_(data), bytes_(bytes), ask_kernel_(ask_kernel) {}

  /// Takes slices until all is taken, or until the population was stopped or has failed.
  void work() noexcept {
    while (!stopped_) {
      const std::int64_t begin = next_.fetch_add(kPopulateSlice.count);
      if (begin >= bytes_.count) return;
      const std::int64_t count = std::min(kPopulateSlice.count, bytes_.count - begin);
      if (const int error = take(data_ + begin, count); error != 0) {
        error_ = error;
        stopped_ = true;
        return;
      }
      done_ += count;
    }
  }
  void stop() { stopped_ = true; }
  Bytes done() const { return {done_}; }

  void check() const {
    if (error_ == 0) return;
    throw MachineError("madvise(MADV_POPULATE_WRITE) failed after " + to_string(done()) + " of an arena of " +
                       to_string(bytes_) + ": " + std::generic_category().message(error_) +
                       "; free host memory, or raise the limit of the process (the container's memory)");
  }

 private:
  int take(std::byte* at, std::int64_t count) noexcept {
    while (ask_kernel_) {
      if (madvise(at, static_cast<std::size_t>(count), MADV_POPULATE_WRITE) == 0) return 0;
      if (errno == EINVAL) {
        ask_kernel_ = false;
      } else if (errno != EINTR && errno != EAGAIN) {
        return errno;
      }
    }
    const std::int64_t page = sysconf(_SC_PAGESIZE);
    for (std::int64_t offset = 0; offset < count; offset += page) {
      // Writes the page without changing what it holds.
      std::atomic_ref(*reinterpret_cast<std::uint8_t*>(at + offset)).fetch_or(0, std::memory_order_relaxed);
    }
    return 0;
  }

  std::byte* const data_;
  const Bytes bytes_;
  std::atomic<bool> ask_kernel_;
  std::atomic<std::int64_t> next_ = 0, done_ = 0;
  std::atomic<int> error_ = 0;
  std::atomic<bool> stopped_ = false;
};

/// Runs threads that work on a population. The destructor tells them to stop and joins them, in every case.
class Crew {
 public:
  Crew(Population& population, int num_threads) : population_(population) {
    threads_.reserve(static_cast<std::size_t>(num_threads));
    try {
      for (int i = 0; i < num_threads; ++i) {
        threads_.emplace_back([this] {
          population_.work();
          const MutexLock lock(mutex_);
          ++num_finished_;
          changed_.notify_all();
        });
      }
    } catch (const std::system_error&) {  // the process gets no more threads: the existing ones do the work
    }
  }
  ~Crew() {
    population_.stop();
    for (std::thread& thread : threads_) thread.join();
  }
  Crew(const Crew&) = delete;  // its threads point at it
  Crew& operator=(const Crew&) = delete;

  bool empty() const { return threads_.empty(); }
  /// Waits at most `time`. Returns true if all threads have finished.
  bool finished_within(std::chrono::milliseconds time) {
    const auto end = std::chrono::steady_clock::now() + time;
    const MutexLock lock(mutex_);
    while (num_finished_ != threads_.size() && changed_.wait_until(mutex_, end)) {
    }
    return num_finished_ == threads_.size();
  }

 private:
  Population& population_;
  Mutex mutex_;
  Condition changed_;
  std::size_t num_finished_ NORIA_GUARDED_BY(mutex_) = 0;
  std::vector<std::thread> threads_;
};

}  // namespace

int num_usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // More than 1024 CPUs do not fit in the set. A machine with so many has enough of them.
  return sched_getaffinity(0, sizeof set, &set) == 0 ? std::max(CPU_COUNT(&set), 1) : kMostThreads;
}

void populate(std::byte* data, Bytes bytes, const OnPopulated& told, PopulateOptions options) {
  const std::int64_t slices = (bytes.count + kPopulateSlice.count - 1) / kPopulateSlice.count;
  const int wanted = options.num_threads > 0 ? options.num_threads : std::min(num_usable_cpus(), kMostThreads);
  const int num_threads = static_cast<int>(std::min<std::int64_t>(wanted, slices));
  Population population(data, bytes, options.ask_kernel);
  if (slices > 1) {
    Crew crew(population, num_threads);
    while (!crew.empty() && !crew.finished_within(kTold)) {
      if (told) told(population.done());
    }
    if (crew.empty()) population.work();
  } else {
    population.work();
  }
  population.check();
  if (told) told(population.done());
}

}  // namespace noria
