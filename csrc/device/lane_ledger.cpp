#include "device/lane_ledger.h"

#include <algorithm>
#include <utility>

#include "device/timing.h"

namespace noria {

std::vector<LaneLedger::Row*> LaneLedger::rows_of(const OpLabel& label) {
  std::vector<Row*> rows{&row(label.lane)};
  if (first_ && label.op < *first_) rows.push_back(&earlier_[static_cast<std::size_t>(label.lane)]);
  return rows;
}

void LaneLedger::stalled(const OpLabel& waiter, Verb giver, std::int64_t ns) {
  const MutexLock lock(mutex_);
  for (Row* row : rows_of(waiter)) row->stalled_ns[{giver, waiter.verb}] += ns;
}

std::int64_t LaneLedger::Row::busy_until(std::int64_t time_ns) const {
  return busy_ns + (start_ns ? std::max<std::int64_t>(0, std::min(time_ns, due_ns) - *start_ns) : 0);
}

void LaneLedger::works(Lane lane, std::int64_t start_ns, std::int64_t due_ns) {
  const MutexLock lock(mutex_);
  row(lane).start_ns = start_ns;
  row(lane).due_ns = due_ns;
  if (update_time_ && lane == Lane::update) update_time_->works(start_ns, due_ns);
}

void LaneLedger::stopped(Lane lane) {
  const MutexLock lock(mutex_);
  row(lane).start_ns.reset();
  if (update_time_ && lane == Lane::update) update_time_->stopped();
}

void LaneLedger::worked(const OpLabel& label, std::int64_t start_ns, std::int64_t end_ns, Bytes bytes, int num_ops) {
  const MutexLock lock(mutex_);
  row(label.lane).start_ns.reset();
  if (label.verb == Verb::probe) return;
  for (Row* row : rows_of(label)) {
    row->busy_ns += end_ns - start_ns;
    row->verb_ns[label.verb] += end_ns - start_ns;
    row->num_ops += num_ops;
    row->bytes += bytes;
  }
  if (update_time_) update_time_->worked(label.lane, label.verb, start_ns, end_ns);
}

void LaneLedger::worked_in_part(const OpLabel& label, std::int64_t start_ns, std::int64_t end_ns) {
  worked(label, start_ns, end_ns, {}, 0);
  const MutexLock lock(mutex_);
  if (!row(label.lane).began_ns) row(label.lane).began_ns = start_ns;
}

void LaneLedger::transferred(const OpLabel& label, std::int64_t start_ns, std::int64_t end_ns, Bytes bytes,
                             std::vector<OpId> waits, int num_ops) {
  worked(label, start_ns, end_ns, bytes, num_ops);
  std::shared_ptr<Trace> trace;
  std::int64_t began_ns = start_ns;
  {
    const MutexLock lock(mutex_);
    trace = trace_;
    began_ns = std::exchange(row(label.lane).began_ns, std::nullopt).value_or(start_ns);
  }
  if (!trace || label.verb == Verb::user) return;
  // The trace counts from its own origin. So both clocks are read now, and the span is placed by its distance from now.
  const std::int64_t trace_now_us = trace->now_us();
  const std::int64_t now = now_ns();
  Span span{label.op, label.lane, label.verb, label.unit, 0, 0, bytes, std::move(waits)};
  span.start_us = trace_now_us - (now - began_ns) / 1000;
  span.end_us = trace_now_us - (now - end_ns) / 1000;
  trace->add(std::move(span));
}

LaneStats LaneLedger::Row::stats() const {
  LaneStats stats{busy_until(now_ns()) / 1000, num_ops, bytes, {}, {}};
  for (const auto& [verb, ns] : verb_ns) stats.busy_us_by_verb[verb] = ns / 1000;
  for (const auto& [pair, ns] : stalled_ns) stats.stalled_us[pair] = ns / 1000;
  return stats;
}

LaneStats LaneLedger::stats(Lane lane) const {
  const MutexLock lock(mutex_);
  return rows_[static_cast<std::size_t>(lane)].stats();
}

void LaneLedger::begin_counting(OpId first) {
  const MutexLock lock(mutex_);
  first_ = first;
  earlier_ = rows_;
  for (Row& row : earlier_) row.start_ns.reset();
}

LaneStats LaneLedger::counted(Lane lane) const {
  const MutexLock lock(mutex_);
  Row row = rows_[static_cast<std::size_t>(lane)];
  const Row& earlier = earlier_[static_cast<std::size_t>(lane)];
  row.busy_ns -= earlier.busy_ns;
  row.num_ops -= earlier.num_ops;
  row.bytes -= earlier.bytes;
  for (const auto& [verb, ns] : earlier.verb_ns) row.verb_ns[verb] -= ns;
  for (const auto& [pair, ns] : earlier.stalled_ns) row.stalled_ns[pair] -= ns;
  return row.stats();
}

std::int64_t LaneLedger::busy_us(Lane lane) const {
  const MutexLock lock(mutex_);
  return rows_[static_cast<std::size_t>(lane)].busy_until(now_ns()) / 1000;
}

void LaneLedger::set_trace(std::shared_ptr<Trace> trace) {
  const MutexLock lock(mutex_);
  trace_ = std::move(trace);
}

void LaneLedger::set_update_time(std::shared_ptr<UpdateTime> update_time) {
  const MutexLock lock(mutex_);
  update_time_ = std::move(update_time);
}

}  // namespace noria
