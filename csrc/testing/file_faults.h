// RandomFileFaults makes requests to files go wrong, at random or at a time that a test names. Only tests use it.
//
// Threads: any thread may call every member. With a door that has one thread, what is drawn depends only on the seed.
#pragma once

#include <cstdint>
#include <random>

#include "base/mutex.h"
#include "device/file_door.h"

namespace noria {

struct FileHostility {
  std::uint64_t seed = 0;         // 0: nothing is drawn
  double short_answers = 0;       // the share of requests that ask for less
  double interruptions = 0;       // the share that EINTR or EAGAIN answers
  std::int64_t max_delay_us = 0;  // before a request, up to this: a disk that stalls
};

class RandomFileFaults final : public FileFaults {
 public:
  explicit RandomFileFaults(const FileHostility& hostility) : hostility_(hostility), random_(hostility.seed) {}

  std::int64_t asks_for(FileWay way, const FilePart& part, Bytes bytes) override;
  /// After `num_before` more requests this way, the next `count` ones fail with the errno.
  void fail_next(FileWay way, int error, int num_before = 0, int count = 1);
  /// Returns how many requests were short, interrupted or failed.
  std::int64_t num_faults() const;

 private:
  struct Failure {
    FileWay way;
    int error, num_before, count;
  };

  const FileHostility hostility_;
  mutable Mutex mutex_;
  std::mt19937_64 random_ NORIA_GUARDED_BY(mutex_);
  Failure failure_ NORIA_GUARDED_BY(mutex_){FileWay::read, 0, 0, 0};
  std::int64_t num_faults_ NORIA_GUARDED_BY(mutex_) = 0;
};

}  // namespace noria
