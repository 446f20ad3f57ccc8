// Runs queued work on one thread of its own, in the order of submission.
//
// Ownership: owns its thread, and shares its state with it. So the thread may destroy its own lane, if the end of a
//   work releases the last owner.
// Order: first in, first out. Each work is run exactly once, or abandoned exactly once because the lane was closed
//   first.
// Threads: any thread may call every member, except `await_issued`, which work on the lane calls. Never takes the GIL.
//
// Note [Forked children]. A child has none of noria's threads, and inherits noria's locks in any state. So in a child,
// work is abandoned at once and closing returns at once. Nothing is joined there, and nothing is destroyed that a
// thread might have held.
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
    std::function<void(std::exception_ptr)> abandon;  // called instead of `run` if the lane was closed first
  };

  /// `name` appears in debuggers and error messages.
  explicit HostLane(const std::string& name);
  ~HostLane();                         // closes
  HostLane(const HostLane&) = delete;  // owns a thread
  HostLane& operator=(const HostLane&) = delete;

  void enqueue(Work work);

  /// Blocks the lane until `ticket` is issued. Throws the giver's failure, or MachineError if the lane is closed.
  void await_issued(const Ticket& ticket);

  /// Blocks until all queued work is done.
  void idle();
  /// Finishes the running work, abandons the rest, joins the thread. Idempotent.
  void close();
  /// Returns true in a child of the process that made this lane.
  bool is_forked() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
  const pid_t pid_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace noria
