#include "device/host_ticket.h"

#include <utility>

#include "base/errors.h"
#include "device/timing.h"

namespace noria {

bool HostTicket::passed() const {
  const MutexLock lock(mutex_);
  return done_;
}

void HostTicket::wait_passed() {
  const MutexLock lock(mutex_);
  while (!done_) done_changed_.wait(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void HostTicket::pass() { finish(nullptr); }

void HostTicket::fail(std::exception_ptr error) {
  NORIA_INVARIANT(error != nullptr, "a ticket failed without saying why");
  finish(std::move(error));
}

void HostTicket::when_done(std::function<void()> callback) {
  {
    const MutexLock lock(mutex_);
    if (!done_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

std::int64_t HostTicket::done_ns() const {
  const MutexLock lock(mutex_);
  NORIA_INVARIANT(done_, "asked when a ticket was given before it was");
  return done_ns_;
}

void HostTicket::finish(std::exception_ptr error) {
  std::vector<std::function<void()>> callbacks;
  {
    const MutexLock lock(mutex_);
    NORIA_INVARIANT(!done_, "the ticket of a " + std::string(to_string(label.verb)) + " op was given twice");
    done_ = true;
    done_ns_ = now_ns();
    error_ = std::move(error);
    callbacks.swap(callbacks_);
    done_changed_.notify_all();
  }
  for (const auto& callback : callbacks) callback();
}

}  // namespace noria
