#include "testing/file_faults.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

namespace noria {

std::int64_t RandomFileFaults::asks_for(FileWay way, const FilePart& /*part*/, Bytes bytes) {
  std::int64_t delay_us = 0;
  const std::int64_t asks = [&]() NORIA_UNCHECKED -> std::int64_t {  // clang does not see the lock from a lambda
    const MutexLock lock(mutex_);
    if (failure_.count > 0 && failure_.way == way && failure_.num_before-- <= 0) {
      --failure_.count;
      ++num_faults_;
      return -failure_.error;
    }
    if (hostility_.seed == 0) return bytes.count;
    std::uniform_real_distribution<double> share;
    if (hostility_.max_delay_us > 0) {
      delay_us = std::uniform_int_distribution<std::int64_t>(0, hostility_.max_delay_us)(random_);
    }
    if (share(random_) < hostility_.interruptions) {
      ++num_faults_;
      return share(random_) < 0.5 ? -EINTR : -EAGAIN;
    }
    if (bytes > kFileAlignment && share(random_) < hostility_.short_answers) {
      ++num_faults_;
      const std::int64_t most = (bytes.count - 1) / kFileAlignment.count;
      return std::uniform_int_distribution<std::int64_t>(1, most)(random_) * kFileAlignment.count;
    }
    return bytes.count;
  }();
  if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
  return asks;
}

void RandomFileFaults::fail_next(FileWay way, int error, int num_before, int count) {
  const MutexLock lock(mutex_);
  failure_ = {way, error, num_before, count};
}

std::int64_t RandomFileFaults::num_faults() const {
  const MutexLock lock(mutex_);
  return num_faults_;
}

}  // namespace noria
