// Trace records what happened, or what a plan predicts: spans on lanes, the waits between them, and memory over time.
//
// Units: microseconds since the trace began.
// Ownership: owns its spans, samples and notes: the newest `capacity` of each. It counts the spans that it has dropped.
// Threads: any.
//
// Predicted traces (simulate) and real traces have the same type, so one can be drawn over the other.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/ids.h"
#include "base/mutex.h"
#include "base/words.h"

namespace noria {

struct Span {
  OpId op;
  Lane lane = Lane::compute;
  Verb verb = Verb::forward;
  UnitId unit;
  std::int64_t start_us = 0;
  std::int64_t end_us = 0;
  Bytes bytes;
  std::vector<OpId> waits;  // ops that this one waited for: arrows in the picture
};

/// Says how many bytes of saved tensors lie in each place at one moment. `lent` is the part of their device memory that
/// is lent to other stages.
struct SavedMemory {
  std::int64_t at_us = 0;
  Bytes on_device, at_peers, at_home, lent;
};

class Trace {
 public:
  explicit Trace(std::size_t capacity);

  void add(Span span);
  void sample(const SavedMemory& memory);
  /// Records an event as text, at the current time.
  void note(std::string text);
  std::vector<Span> spans() const;
  std::size_t num_dropped() const;
  void clear();

  /// Returns microseconds since this trace was made.
  std::int64_t now_us() const;

  /// Returns Chrome/Perfetto JSON: one row per lane, one slice per span ("fetch blocks.3"), one flow arrow per wait.
  /// Saved memory is a counter over time, and notes are instants.
  std::string chrome_json(const std::vector<std::string>& unit_names) const;

 private:
  const std::size_t capacity_;
  const std::int64_t origin_ns_;
  mutable Mutex mutex_;
  std::deque<Span> spans_ NORIA_GUARDED_BY(mutex_);
  std::deque<SavedMemory> saved_ NORIA_GUARDED_BY(mutex_);
  std::deque<std::pair<std::int64_t, std::string>> notes_ NORIA_GUARDED_BY(mutex_);
  std::size_t num_dropped_ NORIA_GUARDED_BY(mutex_) = 0;
};

/// Returns a monotonic clock in microseconds, for durations. Its zero is no trace's (see `now_us`).
std::int64_t clock_us();

}  // namespace noria
