// HostTicket is a ticket that a host thread gives: issued and passed are the same moment.
//
// Threads: the giver calls `pass` or `fail`, once. Any thread may call the other members. Callbacks run on the giver's
//   thread, without locks held, in the order they were added. A callback added later runs at once on the adding thread.
#pragma once

#include <exception>
#include <functional>
#include <vector>

#include "base/mutex.h"
#include "device/backend.h"

namespace noria {

class HostTicket final : public TicketState {
 public:
  using TicketState::TicketState;

  bool passed() const override;
  void wait_passed() override;
  void wait_issued() override { wait_passed(); }
  void when_issued(std::function<void()> callback) override { when_done(std::move(callback)); }

  void pass();
  void fail(std::exception_ptr error);
  void when_done(std::function<void()> callback);
  /// Returns when it was given, on the clock of `now_ns`. Call it only after that.
  std::int64_t done_ns() const;

 private:
  void finish(std::exception_ptr error);

  mutable Mutex mutex_;
  Condition done_changed_;
  bool done_ NORIA_GUARDED_BY(mutex_) = false;
  std::int64_t done_ns_ NORIA_GUARDED_BY(mutex_) = 0;
  std::exception_ptr error_ NORIA_GUARDED_BY(mutex_);
  std::vector<std::function<void()>> callbacks_ NORIA_GUARDED_BY(mutex_);
};

}  // namespace noria
