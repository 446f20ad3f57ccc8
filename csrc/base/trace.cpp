#include "base/trace.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string_view>
#include <unordered_map>

namespace noria {
namespace {

std::int64_t clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string slice_name(const Span& span, const std::vector<std::string>& unit_names) {
  std::string name(to_string(span.verb));
  if (!span.unit.valid()) return name;
  const auto index = static_cast<std::size_t>(span.unit.value);
  return name + ' ' + (index < unit_names.size() ? unit_names[index] : std::to_string(index));
}

/// Returns `"ts":..., "pid":0, "tid":<lane>`, which every event of a lane carries.
std::string where(std::int64_t at_us, Lane lane) {
  return "\"ts\":" + std::to_string(at_us) + ",\"pid\":0,\"tid\":" + std::to_string(static_cast<int>(lane));
}

}  // namespace

std::int64_t clock_us() { return clock_ns() / 1000; }

Trace::Trace(std::size_t capacity) : capacity_(capacity), origin_ns_(clock_ns()) {}

void Trace::add(Span span) {
  const MutexLock lock(mutex_);
  spans_.push_back(std::move(span));
  if (spans_.size() > capacity_) {
    spans_.pop_front();
    ++num_dropped_;
  }
}

void Trace::sample(const SavedMemory& memory) {
  const MutexLock lock(mutex_);
  saved_.push_back(memory);
  if (saved_.size() > capacity_) saved_.pop_front();
}

void Trace::note(std::string text) {
  const MutexLock lock(mutex_);
  notes_.emplace_back(now_us(), std::move(text));
  if (notes_.size() > capacity_) notes_.pop_front();
}

std::vector<Span> Trace::spans() const {
  const MutexLock lock(mutex_);
  return {spans_.begin(), spans_.end()};
}

std::size_t Trace::num_dropped() const {
  const MutexLock lock(mutex_);
  return num_dropped_;
}

void Trace::clear() {
  const MutexLock lock(mutex_);
  spans_.clear();
  saved_.clear();
  notes_.clear();
  num_dropped_ = 0;
}

std::int64_t Trace::now_us() const { return (clock_ns() - origin_ns_) / 1000; }

std::string Trace::chrome_json(const std::vector<std::string>& unit_names) const {
  const std::vector<Span> all = spans();
  std::unordered_map<OpId, const Span*> by_op;
  for (const Span& span : all) by_op[span.op] = &span;

  std::string out = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
                    "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":0,\"args\":{\"name\":\"noria\"}}";
  for (int i = 0; i < kNumLanes; ++i) {
    const std::string row = ",\"pid\":0,\"tid\":" + std::to_string(i) + ",\"args\":{";
    out += ",\n{\"ph\":\"M\",\"name\":\"thread_name\"" + row +
           "\"name\":" + json_string(to_string(static_cast<Lane>(i))) + "}}";
    out += ",\n{\"ph\":\"M\",\"name\":\"thread_sort_index\"" + row + "\"sort_index\":" + std::to_string(i) + "}}";
  }
  std::int64_t num_arrows = 0;
  for (const Span& span : all) {
    out += ",\n{\"ph\":\"X\",\"name\":" + json_string(slice_name(span, unit_names)) + "," +
           where(span.start_us, span.lane) + ",\"dur\":" + std::to_string(span.end_us - span.start_us) +
           ",\"args\":{\"op\":" + std::to_string(span.op.value) + ",\"bytes\":" + std::to_string(span.bytes.count) +
           "}}";
    for (OpId wait : span.waits) {
      const auto giver = by_op.find(wait);
      if (giver == by_op.end()) continue;  // the ring has dropped this op
      // An arrow must leave from inside its slice, and a slice does not contain its own end.
      const std::int64_t leaves_us = std::max(giver->second->start_us, giver->second->end_us - 1);
      const std::string arrow = "\"name\":\"wait\",\"cat\":\"wait\",\"id\":" + std::to_string(num_arrows++) + ",";
      out += ",\n{\"ph\":\"s\"," + arrow + where(leaves_us, giver->second->lane) + "}";
      out += ",\n{\"ph\":\"f\",\"bp\":\"e\"," + arrow + where(span.start_us, span.lane) + "}";
    }
  }
  const MutexLock lock(mutex_);
  for (const SavedMemory& memory : saved_) {
    out += ",\n{\"ph\":\"C\",\"name\":\"saved for backward\",\"pid\":0,\"ts\":" + std::to_string(memory.at_us) +
           ",\"args\":{\"on the device\":" + std::to_string(memory.on_device.count) +
           ",\"at peers\":" + std::to_string(memory.at_peers.count) +
           ",\"at home\":" + std::to_string(memory.at_home.count) + ",\"lent\":" + std::to_string(memory.lent.count) +
           "}}";
  }
  for (const auto& [at_us, text] : notes_) {
    out += ",\n{\"ph\":\"i\",\"s\":\"p\",\"name\":" + json_string(text) +
           ",\"pid\":0,\"tid\":0,\"ts\":" + std::to_string(at_us) + "}";
  }
  return out + "\n]}\n";
}

}  // namespace noria
