// A queue of work with one thread of its own, in the order of submission.
//
// Ownership: owns its thread. What the thread touches between two works is shared with it, so a lane may even be
// destroyed by its own thread, when the last thing a work does is to release the last owner.
// Order: first in, first out. Each work is run, or abandoned because the lane was closed first, exactly once.
// Threads: every member from any thread, except `await_issued`, which works on the lane call. Never takes the GIL.
//
// Note [Forked children]. A child has none of our threads and inherits our locks in any state: there, work is abandoned
// at once, closing returns at once, and nothing is joined or destroyed that a thread might have held.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include <sys/types.h>

#include "device/backend.h"

namespace noria {

class HostLane {
 public:
  struct Work {
    std::function<void()> run;                        // must not throw
    std::function<void(std::exception_ptr)> abandon;  // called instead of `run` when the lane was closed first
  };

  /// `name` is what debuggers and error messages call it.
  explicit HostLane(const std::string& name);
  ~HostLane();                         // closes
  HostLane(const HostLane&) = delete;  // the thread is ours
  HostLane& operator=(const HostLane&) = delete;

  void enqueue(Work work);

  /// Blocks the lane until `ticket` is issued. Throws the giver's failure, or MachineError when the lane is closed.
  void await_issued(const Ticket& ticket);

  /// Blocks until all work that was queued is done.
  void idle();
  /// Finishes the running work, abandons the rest, joins. Idempotent.
  void close();
  /// True in a child of the process that made this lane.
  bool is_forked() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
  const pid_t pid_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace noria
