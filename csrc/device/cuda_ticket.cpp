#include "device/cuda_ticket.h"

#include <unistd.h>

#include <utility>

#include "base/errors.h"
#include "device/timing.h"

namespace noria {

EventPool::EventPool(CudaDevice device, unsigned flags) : device_(std::move(device)), flags_(flags), pid_(getpid()) {}

cuda::EventHandle EventPool::take() {
  const MutexLock lock(mutex_);
  if (!idle_.empty()) {
    cuda::EventHandle event = idle_.back();
    idle_.pop_back();
    return event;
  }
  const OnDevice on(device_);
  cuda::EventHandle event = nullptr;
  device_.check(device_->EventCreateWithFlags(&event, flags_), "cudaEventCreateWithFlags");
  ++num_created_;
  return event;
}

void EventPool::give_back(cuda::EventHandle event) noexcept {
  if (getpid() != pid_) return;  // a forked child must not touch CUDA
  const MutexLock lock(mutex_);
  if (is_closed_) destroy(event);
  else idle_.push_back(event);
}

void EventPool::close() noexcept {
  const MutexLock lock(mutex_);
  is_closed_ = true;
  for (cuda::EventHandle event : idle_) destroy(event);
  idle_.clear();
}

std::int64_t EventPool::num_created() const {
  const MutexLock lock(mutex_);
  return num_created_;
}

void EventPool::destroy(cuda::EventHandle event) noexcept {
  if (device_->EventDestroy(event) != cuda::kSuccess) device_.forget_error();
}

CudaTicket::CudaTicket(const OpLabel& op, CudaDevice device, std::shared_ptr<EventPool> events, Bytes bytes)
    : TicketState(op),
      device_(std::move(device)),
      bytes_(bytes),
      opened_ns_(now_ns()),
      events_(std::move(events)),
      issued_(op) {}

CudaTicket::~CudaTicket() {
  if (event_ != nullptr) events_->give_back(event_);
}

bool CudaTicket::passed() const {
  if (has_passed_) return true;
  if (!issued_.passed()) return false;
  if (!is_recorded_) return true;  // failed
  const OnDevice on(device_);
  const cuda::Error error = device_->EventQuery(event_);
  if (error == cuda::kSuccess) {
    has_passed_ = true;
    return true;
  }
  device_.forget_error();           // "not ready" stays behind like any error
  return error != cuda::kNotReady;  // a broken device: wait_passed will raise
}

void CudaTicket::wait_passed() {
  issued_.wait_passed();
  if (has_passed_) return;
  const OnDevice on(device_);
  device_.check(device_->EventSynchronize(event_), "cudaEventSynchronize");
  has_passed_ = true;
}

void CudaTicket::record(cuda::StreamHandle stream, std::shared_ptr<TimedPoint> timed) {
  NORIA_INVARIANT(!issued_.passed(), "the ticket of a " + std::string(to_string(label.verb)) + " op was given twice");
  event_ = events_->take();
  device_.check(device_->EventRecord(event_, stream), "cudaEventRecord");
  timed_ = std::move(timed);
  is_recorded_ = true;
  issued_.pass();
}

void CudaTicket::hold_back(cuda::StreamHandle stream) const {
  device_.check(device_->StreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
}

void hold_back(cuda::StreamHandle stream, const Ticket& ticket) {
  if (const auto* on_device = dynamic_cast<const CudaTicket*>(ticket.get())) on_device->hold_back(stream);
}

}  // namespace noria
