#include "device/lane_ledger.h"

#include <algorithm>

#include "device/timing.h"

namespace noria {

void LaneLedger::stalled(Lane lane, Verb giver, Verb waiter, std::int64_t ns) {
  std::lock_guard lock(mutex_);
  rows_[static_cast<std::size_t>(lane)].stalled_ns[{giver, waiter}] += ns;
}

std::int64_t LaneLedger::Row::busy_until(std::int64_t time_ns) const {
  return busy_ns + (start_ns ? std::max<std::int64_t>(0, std::min(time_ns, due_ns) - *start_ns) : 0);
}

void LaneLedger::works(Lane lane, std::int64_t start_ns, std::int64_t due_ns) {
  std::lock_guard lock(mutex_);
  Row& row = rows_[static_cast<std::size_t>(lane)];
  row.start_ns = start_ns;
  row.due_ns = due_ns;
}

void LaneLedger::stopped(Lane lane) {
  std::lock_guard lock(mutex_);
  rows_[static_cast<std::size_t>(lane)].start_ns.reset();
}

void LaneLedger::worked(const OpLabel& label, std::int64_t start_ns, std::int64_t end_ns, Bytes bytes) {
  std::lock_guard lock(mutex_);
  Row& row = rows_[static_cast<std::size_t>(label.lane)];
  row.start_ns.reset();
  if (label.verb == Verb::probe) return;
  row.busy_ns += end_ns - start_ns;
  row.num_ops += 1;
  row.bytes += bytes;
}

void LaneLedger::transferred(const OpLabel& label, std::int64_t start_ns, std::int64_t end_ns, Bytes bytes,
                             std::vector<OpId> waits) {
  worked(label, start_ns, end_ns, bytes);
  if (label.lane == Lane::compute) return;
  std::shared_ptr<Trace> trace;
  {
    std::lock_guard lock(mutex_);
    trace = trace_;
  }
  if (!trace) return;
  // The trace counts from its own origin; both clocks are read now and the span is placed by its distance from now.
  const std::int64_t trace_now_us = trace->now_us();
  const std::int64_t now = now_ns();
  Span span{label.op, label.lane, label.verb, label.unit, 0, 0, bytes, std::move(waits)};
  span.start_us = trace_now_us - (now - start_ns) / 1000;
  span.end_us = trace_now_us - (now - end_ns) / 1000;
  trace->add(std::move(span));
}

LaneStats LaneLedger::stats(Lane lane) const {
  std::lock_guard lock(mutex_);
  const Row& row = rows_[static_cast<std::size_t>(lane)];
  LaneStats stats{row.busy_until(now_ns()) / 1000, row.num_ops, row.bytes, {}};
  for (const auto& [pair, ns] : row.stalled_ns) stats.stalled_us[pair] = ns / 1000;
  return stats;
}

std::int64_t LaneLedger::busy_us(Lane lane) const {
  std::lock_guard lock(mutex_);
  return rows_[static_cast<std::size_t>(lane)].busy_until(now_ns()) / 1000;
}

void LaneLedger::set_trace(std::shared_ptr<Trace> trace) {
  std::lock_guard lock(mutex_);
  trace_ = std::move(trace);
}

}  // namespace noria
