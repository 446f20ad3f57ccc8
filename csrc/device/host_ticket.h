// A ticket that some host thread gives: issued and passed are the same moment.
//
// Threads: `pass` and `fail` once, by the giver; everything else from any thread. Callbacks run on the giver's thread,
// without locks held, in the order they were added; one added after the fact runs at once on the adding thread.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

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
  /// When it was given, as `now_ns` counts; only once it has been.
  std::int64_t done_ns() const;

 private:
  void finish(std::exception_ptr error);

  mutable std::mutex mutex_;
  std::condition_variable done_changed_;
  bool done_ = false;
  std::int64_t done_ns_ = 0;
  std::exception_ptr error_;
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace noria
