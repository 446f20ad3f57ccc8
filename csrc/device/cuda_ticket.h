// Marks a point in a CUDA stream with an event from a pool.
//
// Ownership: a ticket takes its event from the pool when it is recorded, and its destructor returns the event. A ticket
//   may outlive the backend.
// Order: a ticket is issued once its event has been recorded. Before that there is no event that a stream could wait
//   for (device/backend.h, Note [Two meanings of a ticket]).
// Threads: the giver calls `record` or `fail`, once. Any thread may call the other members.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include <sys/types.h>

#include "base/mutex.h"
#include "device/backend.h"
#include "device/cuda_device.h"
#include "device/host_ticket.h"

namespace noria {

/// Keeps events for reuse, and makes new ones only until the steady need is met. An event that is returned after
/// `close` is destroyed. An event may be returned before the device has passed it, and recorded again at once. That is
/// safe, because a waiting stream has captured the earlier record.
class EventPool {
 public:
  explicit EventPool(CudaDevice device, unsigned flags = cuda::kEventDisableTiming | cuda::kEventBlockingSync);

  cuda::EventHandle take();
  void give_back(cuda::EventHandle event) noexcept;
  void close() noexcept;
  std::int64_t num_created() const;

 private:
  void destroy(cuda::EventHandle event) noexcept;

  const CudaDevice device_;
  const unsigned flags_;
  const pid_t pid_;
  mutable Mutex mutex_;
  std::vector<cuda::EventHandle> idle_ NORIA_GUARDED_BY(mutex_);
  std::int64_t num_created_ NORIA_GUARDED_BY(mutex_) = 0;
  bool is_closed_ NORIA_GUARDED_BY(mutex_) = false;
};

struct TimedPoint;  // device/cuda_times.h

class CudaTicket final : public TicketState {
 public:
  CudaTicket(const OpLabel& op, CudaDevice device, std::shared_ptr<EventPool> events, Bytes bytes = {});
  ~CudaTicket() override;

  bool passed() const override;
  void wait_passed() override;
  void wait_issued() override { issued_.wait_passed(); }
  void when_issued(std::function<void()> callback) override { issued_.when_done(std::move(callback)); }

  /// Records the event in `stream`. `timed`: the point whose time tells when the device gets here; null if it is not
  /// timed.
  void record(cuda::StreamHandle stream, std::shared_ptr<TimedPoint> timed = nullptr);
  void fail(std::exception_ptr error) { issued_.fail(std::move(error)); }
  std::int64_t opened_ns() const { return opened_ns_; }
  Bytes bytes() const { return bytes_; }
  /// Returns the timed point; null if the ticket failed. Call it only after `wait_issued`.
  const std::shared_ptr<TimedPoint>& timed() const { return timed_; }
  /// Makes the stream wait. Call it only after `wait_issued`.
  void hold_back(cuda::StreamHandle stream) const;

 private:
  const CudaDevice device_;
  const Bytes bytes_;
  const std::int64_t opened_ns_;
  const std::shared_ptr<EventPool> events_;
  std::shared_ptr<TimedPoint> timed_;
  cuda::EventHandle event_ = nullptr;  // these three are written before `issued_` passes, and read only after
  bool is_recorded_ = false;
  HostTicket issued_;
  mutable std::atomic<bool> has_passed_ = false;
};

/// Makes `stream` wait for an issued ticket. Does nothing for a host ticket, because an issued one has passed.
void hold_back(cuda::StreamHandle stream, const Ticket& ticket);

}  // namespace noria
