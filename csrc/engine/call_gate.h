// CallGate lets one thread at a time into the engine, and lets the engine call out of itself.
//
// Order: `outside` opens the gate for the calling thread alone. So Python code that the engine runs may call the
// engine. A deferred update must not ask for the unit that it updates: that call would wait for the update itself.
// Other threads wait until the call outside has returned. No lock is held meanwhile.
// Threads: any. Never called with the GIL held: the thread inside may want it.
#pragma once

#include <atomic>
#include <thread>

#include "base/errors.h"
#include "base/mutex.h"

namespace noria {

class NORIA_THREAD_ANNOTATION(capability("gate")) CallGate {
 public:
  /// Holds the gate from its construction to its destruction. Throws InvariantError if this thread holds it already.
  class NORIA_THREAD_ANNOTATION(scoped_lockable) Entry {
   public:
    explicit Entry(CallGate& gate) NORIA_ACQUIRE(gate) : gate_(gate) { gate.enter(); }
    ~Entry() NORIA_RELEASE() { gate_.leave(); }
    Entry(const Entry&) = delete;  // a gate is held once
    Entry& operator=(const Entry&) = delete;

   private:
    CallGate& gate_;
  };

  /// Calls `call` without the gate, and takes the gate again. The caller holds the gate.
  template <class Call>
  auto outside(const Call& call) NORIA_UNCHECKED {  // `leave` unlocks, `enter` locks
    ++depth_;
    outside_ = std::this_thread::get_id();
    leave();
    struct Return {  // also if `call` throws
      CallGate& gate;
      ~Return() {
        gate.enter();
        if (--gate.depth_ == 0) gate.outside_ = {};
        gate.returned_.notify_all();
      }
    } returns{*this};
    return call();
  }

 private:
  void enter() NORIA_UNCHECKED {
    const auto self = std::this_thread::get_id();
    NORIA_INVARIANT(inside_ != self, "the engine is called inside of a call");
    mutex_.lock();
    while (depth_ != 0 && outside_ != self) returned_.wait(mutex_);
    inside_ = self;
  }
  void leave() NORIA_UNCHECKED {
    inside_ = std::thread::id();
    mutex_.unlock();
  }

  Mutex mutex_;
  Condition returned_;
  std::atomic<std::thread::id> inside_;               // the thread that holds `mutex_`
  int depth_ NORIA_GUARDED_BY(mutex_) = 0;            // calls of `outside` that have not returned
  std::thread::id outside_ NORIA_GUARDED_BY(mutex_);  // the thread that makes them
};

/// Gives access to a part of the engine, and holds the gate as long as it lives. Let it die before the next call of the
/// engine.
template <class Part>
class Held {
 public:
  Held(CallGate& gate, Part& part) : entry_(gate), part_(part) {}
  Part* operator->() const { return &part_; }
  Part& operator*() const { return part_; }

 private:
  CallGate::Entry entry_;
  Part& part_;
};

}  // namespace noria
