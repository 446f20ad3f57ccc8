#include "device/host_lane.h"

#include <deque>
#include <optional>
#include <system_error>
#include <utility>

#include <unistd.h>

#include "base/errors.h"
#include "base/mutex.h"
#include "device/own_thread.h"

namespace noria {

struct HostLane::State {
  explicit State(std::string lane_name) : name(std::move(lane_name)) {}

  const std::string name;
  std::thread::id thread_id;  // set before any other thread can see the lane
  Mutex mutex;
  Condition changed;
  std::deque<Work> queue NORIA_GUARDED_BY(mutex);
  bool running NORIA_GUARDED_BY(mutex) = false;
  bool closing NORIA_GUARDED_BY(mutex) = false;
  bool ended NORIA_GUARDED_BY(mutex) = false;

  std::exception_ptr closed_error() const {
    return std::make_exception_ptr(MachineError("the " + name + " lane was closed before this op could run"));
  }

  void serve() {
    begin_own_thread(name);
    while (std::optional<Work> work = next()) {
      work->run();
      work.reset();  // releases what it held before any thread sees an idle lane
    }
    for (Work& work : take_rest()) work.abandon(closed_error());
    const MutexLock lock(mutex);
    ended = true;
    changed.notify_all();
  }

  /// Blocks until there is work. The work before it counts as running until this call. Returns none if the lane is
  /// closed.
  std::optional<Work> next() {
    const MutexLock lock(mutex);
    running = false;
    changed.notify_all();
    while (!closing && queue.empty()) changed.wait(mutex);
    if (closing) return std::nullopt;
    Work work = std::move(queue.front());
    queue.pop_front();
    running = true;
    return work;
  }

  std::deque<Work> take_rest() {
    const MutexLock lock(mutex);
    return std::exchange(queue, {});
  }
};

HostLane::HostLane(const std::string& name) : state_(std::make_shared<State>(name)), pid_(getpid()) {
  const MutexLock lock(state_->mutex);
  try {
    thread_ = std::make_unique<std::thread>([state = state_] { state->serve(); });
  } catch (const std::system_error& error) {
    throw MachineError("starting the thread of the " + name + " lane failed: " + error.what());
  }
  state_->thread_id = thread_->get_id();
}

HostLane::~HostLane() {
  close();
  if (is_forked()) {
    [[maybe_unused]] std::thread* const parents = thread_.release();  // must be neither joined nor detached here
  } else if (thread_->joinable()) {
    thread_->detach();  // the lane's own thread closed it, and cannot join itself
  }
}

bool HostLane::is_forked() const { return getpid() != pid_; }

void HostLane::enqueue(Work work) {
  if (is_forked()) {
    work.abandon(std::make_exception_ptr(
        MachineError("the " + state_->name + " lane belongs to the parent process: a forked child has no lanes")));
    return;
  }
  {
    const MutexLock lock(state_->mutex);
    if (!state_->closing) {
      state_->queue.push_back(std::move(work));
      state_->changed.notify_all();
      return;
    }
  }
  work.abandon(state_->closed_error());
}

void HostLane::await_issued(const Ticket& ticket) {
  auto issued = std::make_shared<bool>(false);  // protected by the lane's mutex; may outlive this call
  ticket->when_issued([state = state_, issued] {
    const MutexLock lock(state->mutex);
    *issued = true;
    state->changed.notify_all();
  });
  {
    const MutexLock lock(state_->mutex);
    while (!*issued && !state_->closing) state_->changed.wait(state_->mutex);
    if (!*issued) std::rethrow_exception(state_->closed_error());
  }
  ticket->wait_issued();  // does not block any more; throws if the giver failed
}

void HostLane::idle() {
  if (is_forked()) return;
  const MutexLock lock(state_->mutex);
  while (!state_->queue.empty() || state_->running) state_->changed.wait(state_->mutex);
}

void HostLane::close() {
  if (is_forked()) return;
  {
    const MutexLock lock(state_->mutex);
    const bool first = !std::exchange(state_->closing, true);
    state_->changed.notify_all();
    if (state_->thread_id == std::this_thread::get_id()) return;
    while (!state_->ended) state_->changed.wait(state_->mutex);
    if (!first) return;
  }
  if (thread_->joinable()) thread_->join();
}

}  // namespace noria
