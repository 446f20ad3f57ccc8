// What happened, or what a plan predicts: spans on lanes, the waits between them, and memory over time.
//
// Units: microseconds since the trace began. Ownership: spans are copied in; a ring keeps the newest `capacity` of them
// and counts what it dropped. Threads: `add` may be called from any thread. Predicted (simulate) and real traces have
// this one type, so they can be laid over each other.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/ids.h"
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

/// Where what blocks have saved for their backwards lies at a moment, and how much of their room is lent to others.
struct SavedMemory {
  std::int64_t at_us = 0;
  Bytes on_device, at_peers, at_home, lent;
};

class Trace {
 public:
  explicit Trace(std::size_t capacity);

  void add(Span span);
  /// Kept as spans are, apart from them.
  void sample(const SavedMemory& memory);
  /// What has come about now, in words.
  void note(std::string text);
  std::vector<Span> spans() const;
  std::size_t num_dropped() const;
  void clear();

  /// Microseconds since this trace was made.
  std::int64_t now_us() const;

  /// Chrome/Perfetto JSON: one row per lane, one slice per span ("fetch blocks.3"), one flow arrow per wait; what is
  /// saved as a counter over time, and notes as instants.
  std::string chrome_json(const std::vector<std::string>& unit_names) const;

 private:
  const std::size_t capacity_;
  const std::int64_t origin_ns_;
  mutable std::mutex mutex_;
  std::deque<Span> spans_;
  std::deque<SavedMemory> saved_;
  std::deque<std::pair<std::int64_t, std::string>> notes_;
  std::size_t num_dropped_ = 0;
};

/// A monotonic clock, in microseconds; the same for every trace of a process.
std::int64_t clock_us();

}  // namespace noria
