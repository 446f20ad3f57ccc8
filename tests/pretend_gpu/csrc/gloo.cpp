#include "gloo.h"

#include <chrono>
#include <thread>
#include <utility>

namespace pretend_gpu {
namespace {

/// Groups in which a call may run still.
void leave_to_itself(c10::intrusive_ptr<c10d::Backend> group) { (void)group.release(); }

}  // namespace

Gloo::Gloo(c10::intrusive_ptr<c10d::Backend> of_collectives, c10::intrusive_ptr<c10d::Backend> of_pairs,
           std::chrono::milliseconds timeout)
    : collectives(std::move(of_collectives)),
      pairs(std::move(of_pairs)),
      timeout_ms_(timeout.count()) {}

Gloo::~Gloo() {
  if (!is_aborted_) return;
  leave_to_itself(collectives);
  leave_to_itself(pairs);
}

void Gloo::set_timeout(std::chrono::milliseconds timeout) {
  timeout_ms_ = timeout.count();
  collectives->setTimeout(timeout);
  pairs->setTimeout(timeout);
}

void Gloo::finish(const Work& work) {
  for (auto pause = std::chrono::microseconds(10); !work->isCompleted(); std::this_thread::sleep_for(pause)) {
    TORCH_CHECK(!is_aborted_, "the communicator was aborted");
    pause = std::min(2 * pause, std::chrono::microseconds(500));
  }
  work->wait();
}

void Gloo::finish_pair(const Work& work) {
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!is_aborted_, "the communicator was aborted");
    pairs_under_way_.insert(work.get());
  }
  std::exception_ptr error;
  try {
    work->wait();
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    pairs_under_way_.erase(work.get());
  }
  TORCH_CHECK(!is_aborted_, "the communicator was aborted");
  if (error) std::rethrow_exception(error);
}

void Gloo::abort() {
  const std::lock_guard lock(mutex_);
  is_aborted_ = true;
  for (c10d::Work* work : pairs_under_way_) work->abort();
}

void Gloo::fail(const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = text;
}

std::string Gloo::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace pretend_gpu
