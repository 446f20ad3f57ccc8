#include "device/timing.h"

#include <cerrno>
#include <ctime>

#include <sys/prctl.h>

namespace noria {

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void sleep_until_ns(std::int64_t deadline_ns) {
  if (now_ns() >= deadline_ns) return;  // the system call gives the core away all the same: 40 us on a virtual machine
  const timespec deadline{deadline_ns / 1'000'000'000, deadline_ns % 1'000'000'000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &deadline, nullptr) == EINTR) {
  }
}

void ask_for_precise_sleep() { prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL); }

bool sleep_for_us(std::int64_t us) {
  if (us > 0) sleep_until_ns(now_ns() + us * 1000);
  return us > 0;
}

}  // namespace noria
