#include "device/cuda_times.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <unistd.h>

#include "device/host_ticket.h"
#include "device/timing.h"

namespace noria {
namespace {

constexpr std::int64_t kAnchorLastsNs = 1'000'000'000;
constexpr std::int64_t kDriftNs = 100'000;  // at most, while an anchor lasts

}  // namespace

TimedPoint::TimedPoint(std::shared_ptr<EventPool> pool, std::int64_t asked)
    : events(std::move(pool)),
      asked_ns(asked) {}

TimedPoint::~TimedPoint() { give_back(); }

void TimedPoint::give_back() noexcept {
  if (cuda::EventHandle given = std::exchange(event, nullptr); given != nullptr) events->give_back(given);
}

TimedOp::Wait TimedOp::wait_of(const Ticket& issued) {
  if (const auto* on_device = dynamic_cast<const CudaTicket*>(issued.get())) {
    return {issued->label, now_ns(), on_device->timed()};
  }
  const auto* on_host = dynamic_cast<const HostTicket*>(issued.get());
  return {issued->label, on_host != nullptr ? on_host->done_ns() : now_ns(), nullptr};
}

CudaTimes::CudaTimes(CudaDevice device, LaneLedger& ledger)
    : device_(std::move(device)),
      pid_(getpid()),
      events_(std::make_shared<EventPool>(device_, cuda::kEventDefault)),
      ledger_(ledger) {}

void CudaTimes::tie(cuda::StreamHandle stream) noexcept {
  try {
    TimedPointPtr first = mark(stream);
    const MutexLock lock(mutex_);
    anchor_ns_ = first->asked_ns;
    anchor_ = std::move(first);
  } catch (...) {  // NOLINT(bugprone-empty-catch): then the first event that is reached becomes the anchor
  }
}

// ---- events in streams ----

TimedPointPtr CudaTimes::mark(cuda::StreamHandle stream) {
  auto point = std::make_shared<TimedPoint>(events_, 0);
  point->event = events_->take();
  point->asked_ns = now_ns();
  device_.check(device_->EventRecord(point->event, stream), "cudaEventRecord");
  return point;
}

bool CudaTimes::has_room(Lane lane) {
  const MutexLock lock(mutex_);
  return has_room_locked(lane);
}

bool CudaTimes::has_room_locked(Lane lane) {
  if (in_flight(lane).ops.size() < kMostInFlight) return true;
  poll_locked();
  return in_flight(lane).ops.size() < kMostInFlight;
}

void CudaTimes::waits(TimedOp op) {
  if (op.waits.empty() || !has_room(op.label.lane)) return;
  const MutexLock lock(mutex_);
  in_flight(op.label.lane).ops.push_back(std::move(op));
}

void CudaTimes::begin(TimedOp& op, cuda::StreamHandle stream) {
  if (has_room(op.label.lane)) op.begin = mark(stream);
}

TimedPointPtr CudaTimes::end(TimedOp op, cuda::StreamHandle stream) {
  if (const MutexLock lock(mutex_); !has_room_locked(op.label.lane)) {
    TimedOp& newest = in_flight(op.label.lane).ops.back();
    if (newest.end && !newest.end->reached_ns) {
      device_.check(device_->EventRecord(newest.end->event, stream), "cudaEventRecord");
      newest.bytes += op.bytes;
      newest.num_ops += op.num_ops;
      return newest.end;
    }
  }
  op.end = mark(stream);
  TimedPointPtr end = op.end;
  const MutexLock lock(mutex_);
  in_flight(op.label.lane).ops.push_back(std::move(op));
  return end;
}

// ---- ops that callers give ----

void CudaTimes::open(const OpLabel& label) {
  if (!label.op.valid()) return;
  const MutexLock lock(mutex_);
  open_[label.op] = {label, nullptr};
}

CudaTimes::Open* CudaTimes::find_open(const OpLabel& waiter) {
  if (waiter.op.valid()) {
    const auto found = open_.find(waiter.op);
    return found == open_.end() ? nullptr : &found->second;
  }
  if (waiter.lane != Lane::compute) return nullptr;
  for (auto& [op, open] : open_) {
    if (open.label.lane == Lane::compute && open.begin) return &open;
  }
  return nullptr;
}

std::optional<OpId> CudaTimes::pause(const OpLabel& waiter, bool has_waits, cuda::StreamHandle stream) {
  TimedOp part;
  {
    const MutexLock lock(mutex_);
    Open* const open = find_open(waiter);
    if (open == nullptr) return std::nullopt;
    if (!open->begin) return open->label.op;
    if (!has_waits) return std::nullopt;  // it continues
    part.label = open->label;
    part.begin = std::exchange(open->begin, nullptr);
  }
  part.num_ops = 0;
  const OpId op = part.label.op;
  end(std::move(part), stream);
  return op;
}

void CudaTimes::resume(OpId op, cuda::StreamHandle stream) {
  TimedPointPtr begin = mark(stream);
  const MutexLock lock(mutex_);
  if (const auto found = open_.find(op); found != open_.end()) found->second.begin = std::move(begin);
}

TimedPointPtr CudaTimes::give(const OpLabel& label, std::int64_t opened_ns, Bytes bytes, cuda::StreamHandle stream) {
  TimedOp op{label, opened_ns, {}, nullptr, nullptr, bytes};
  {
    const MutexLock lock(mutex_);
    if (auto found = open_.extract(label.op)) op.begin = std::move(found.mapped().begin);
  }
  return end(std::move(op), stream);
}

void CudaTimes::give_up(const OpLabel& label) {
  const MutexLock lock(mutex_);
  open_.erase(label.op);
}

// ---- times ----

std::optional<std::int64_t> CudaTimes::time_of(const TimedPointPtr& point) {
  if (point->reached_ns) return point->reached_ns;
  const bool is_first = !anchor_;
  float elapsed_ms = 0;
  const cuda::Error error =
      device_->EventElapsedTime(&elapsed_ms, is_first ? point->event : anchor_->event, point->event);
  if (error != cuda::kSuccess) device_.forget_error();
  if (error == cuda::kNotReady) return std::nullopt;
  if (error != cuda::kSuccess) {  // the device is broken; a wait for this op raises
    point->reached_ns = point->asked_ns;
    return point->reached_ns;
  }
  if (is_first) anchor_ns_ = point->asked_ns;
  const auto elapsed_ns = static_cast<std::int64_t>(std::llround(static_cast<double>(elapsed_ms) * 1e6));
  const std::int64_t counted_ns = anchor_ns_ + elapsed_ns;
  const std::int64_t reached_ns = std::clamp(counted_ns, point->asked_ns, std::max(point->asked_ns, now_ns()));
  anchor_ns_ += reached_ns - counted_ns;
  point->reached_ns = reached_ns;
  if (is_first || elapsed_ns > kAnchorLastsNs) {
    anchor_ = point;
    anchor_ns_ = is_first ? reached_ns : reached_ns - kDriftNs;
  } else {
    point->give_back();
  }
  return point->reached_ns;
}

/// Returns false if the device has not come that far.
bool CudaTimes::run_deferred(InFlight& lane, const TimedOp& op) {
  // Looks up the times in the order in which the device reached them, so that moving the anchor does not reverse that
  // order.
  for (const TimedOp::Wait& wait : op.waits) {
    if (wait.passed && wait.passed->events == events_ && !time_of(wait.passed)) return false;
  }
  const std::optional<std::int64_t> begun_ns = op.begin ? time_of(op.begin) : std::nullopt;
  const std::optional<std::int64_t> ended_ns = op.end ? time_of(op.end) : std::nullopt;
  if (op.end && !ended_ns) return false;
  std::int64_t free_ns = std::max(lane.free_ns, op.told_ns);
  for (const TimedOp::Wait& wait : op.waits) {
    const bool is_ours = wait.passed && wait.passed->events == events_;
    const std::int64_t passed_ns = is_ours ? *wait.passed->reached_ns : wait.seen_ns;
    if (passed_ns > free_ns) ledger_.stalled(op.label, wait.giver.verb, passed_ns - free_ns);
    free_ns = std::max(free_ns, passed_ns);
    lane.waited.push_back(wait.giver.op);
  }
  lane.free_ns = free_ns;
  if (!op.end) return true;
  // The anchor may have moved meanwhile. Even then an op does not begin before what it comes after.
  const std::int64_t start_ns = std::max(begun_ns.value_or(free_ns), free_ns);
  const std::int64_t end_ns = std::max(*ended_ns, start_ns);
  if (op.num_ops == 0) {
    ledger_.worked_in_part(op.label, start_ns, end_ns);
  } else {
    ledger_.transferred(op.label, start_ns, end_ns, op.bytes, std::exchange(lane.waited, {}), op.num_ops);
  }
  lane.free_ns = end_ns;
  return true;
}

void CudaTimes::poll_locked() {
  const OnDevice on(device_);
  for (InFlight& lane : lanes_) {
    while (!lane.ops.empty() && run_deferred(lane, lane.ops.front())) lane.ops.pop_front();
  }
}

void CudaTimes::poll() noexcept {
  if (getpid() != pid_) return;  // a forked child must not touch CUDA
  try {
    const MutexLock lock(mutex_);
    poll_locked();
  } catch (...) {  // NOLINT(bugprone-empty-catch): numbers come later, or never
  }
}

void CudaTimes::close() noexcept {
  poll();
  const MutexLock lock(mutex_);
  for (InFlight& lane : lanes_) lane.ops.clear();
  open_.clear();
  anchor_.reset();
  events_->close();
}

}  // namespace noria
