// Runs a function for each of many numbers, on the threads of a TBB arena.
//
// Order: none between numbers. What the caller has written before is seen there, and what they write is seen after.
// Threads: one call at a time for each arena.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

namespace noria {

template <class Body>
void for_each_number(tbb::task_arena& arena, std::size_t count, const Body& body) {
  // TBB orders all this itself, but ThreadSanitizer cannot see into its library. So two atomics repeat the order.
  std::atomic<bool> begun = false;
  std::atomic<std::int64_t> num_ranges = 0;
  begun.store(true, std::memory_order_release);
  arena.execute([&] {
    tbb::parallel_for(tbb::blocked_range<std::size_t>(0, count), [&](const auto& range) {
      (void)begun.load(std::memory_order_acquire);
      for (std::size_t i = range.begin(); i != range.end(); ++i) body(i);
      num_ranges.fetch_add(1, std::memory_order_release);
    });
  });
  (void)num_ranges.load(std::memory_order_acquire);
}

}  // namespace noria
