// A point in a CUDA stream, marked by an event of a pool.
//
// Ownership: a ticket takes its event from the pool when it is recorded and gives it back when nobody has the ticket
//   any more; it may outlive the backend. Order: a ticket is issued once its event has been recorded; before that there
//   is no event, and no stream can be asked to wait for it (device/backend.h, Note [Two meanings of a ticket]).
// Threads: `record` and `fail` by whoever gives the ticket, once; everything else by any.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <sys/types.h>

#include "device/backend.h"
#include "device/cuda_device.h"
#include "device/host_ticket.h"

namespace noria {

/// Events are made up to the steady need and used again. What comes back after `close` is destroyed. An event that
/// comes back before the device has passed it may be recorded again at once: a stream that waits for it captured the
/// earlier record.
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
  mutable std::mutex mutex_;
  std::vector<cuda::EventHandle> idle_;
  std::int64_t num_created_ = 0;
  bool is_closed_ = false;
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

  /// `timed`: when the device comes by, as far as that is measured.
  void record(cuda::StreamHandle stream, std::shared_ptr<TimedPoint> timed = nullptr);
  void fail(std::exception_ptr error) { issued_.fail(std::move(error)); }
  std::int64_t opened_ns() const { return opened_ns_; }
  Bytes bytes() const { return bytes_; }
  /// Only after `wait_issued`; none of what has failed.
  const std::shared_ptr<TimedPoint>& timed() const { return timed_; }
  /// The stream waits. Only after `wait_issued`.
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

/// `stream` waits for an issued ticket. A host ticket that is issued has passed.
void hold_back(cuda::StreamHandle stream, const Ticket& ticket);

}  // namespace noria
