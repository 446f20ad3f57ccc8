// One thread at a time is inside the gate, but for calls that a thread makes from `outside`.
#include "engine/call_gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>

namespace noria {
namespace {

TEST(CallGate, refuses_a_call_inside_of_a_call) {
  CallGate gate;
  const CallGate::Entry entry(gate);
  EXPECT_THROW(CallGate::Entry{gate}, InvariantError);
}

TEST(CallGate, lets_the_same_thread_in_from_outside_and_nests) {
  CallGate gate;
  int calls = 0;
  const CallGate::Entry entry(gate);
  gate.outside([&] {
    const CallGate::Entry again(gate);
    gate.outside([&] {
      const CallGate::Entry once_more(gate);
      ++calls;
    });
    ++calls;
  });
  EXPECT_EQ(calls, 2);
  EXPECT_THROW(CallGate::Entry{gate}, InvariantError);  // it is inside again
}

TEST(CallGate, keeps_other_threads_out_until_the_call_outside_is_done) {
  CallGate gate;
  std::atomic<bool> is_trying = false, is_done = false, came_early = false;
  std::thread other;
  {
    const CallGate::Entry entry(gate);
    gate.outside([&] {
      other = std::thread([&] {
        is_trying = true;
        const CallGate::Entry entered(gate);
        came_early = !is_done;
      });
      while (!is_trying) std::this_thread::yield();
      for (int i = 0; i < 1000; ++i) {  // the gate changes hands, but only between this thread and itself
        const CallGate::Entry again(gate);
      }
      is_done = true;
    });
  }
  other.join();
  EXPECT_FALSE(came_early);
}

TEST(CallGate, is_taken_again_if_the_call_outside_throws) {
  CallGate gate;
  {
    const CallGate::Entry entry(gate);
    EXPECT_THROW(gate.outside([] { throw std::runtime_error("an update"); }), std::runtime_error);
    EXPECT_THROW(CallGate::Entry{gate}, InvariantError);
  }
  const CallGate::Entry entry(gate);
}

}  // namespace
}  // namespace noria
