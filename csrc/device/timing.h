// Provides a precise clock, and sleep that ends on time.
//
// Units: nanoseconds of CLOCK_MONOTONIC.
#pragma once

#include <cstdint>

namespace noria {

std::int64_t now_ns();

/// Sleeps until the clock shows `deadline_ns`. Returns at once if that has passed.
void sleep_until_ns(std::int64_t deadline_ns);

/// Asks the kernel to wake this thread on time. By default a sleep may be 50 us late.
void ask_for_precise_sleep();

/// Sleeps if `us` is more than 0. Returns true if it is.
bool sleep_for_us(std::int64_t us);

}  // namespace noria
