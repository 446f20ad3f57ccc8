// Mutex, MutexLock and Condition are std::mutex, std::lock_guard and std::condition_variable, with annotations that
// clang checks (`make lint`). A member that a mutex protects says so, and so does a function that wants it held.
//
// Example:
//   Mutex mutex_;
//   int count_ NORIA_GUARDED_BY(mutex_) = 0;
//   void add() NORIA_REQUIRES(mutex_);
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define NORIA_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define NORIA_THREAD_ANNOTATION(x)
#endif

#define NORIA_GUARDED_BY(mutex) NORIA_THREAD_ANNOTATION(guarded_by(mutex))
#define NORIA_REQUIRES(...) NORIA_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define NORIA_ACQUIRE(...) NORIA_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define NORIA_RELEASE(...) NORIA_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
/// For functions whose locking clang cannot follow. Say why.
#define NORIA_UNCHECKED NORIA_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace noria {

class NORIA_THREAD_ANNOTATION(capability("mutex")) Mutex {
 public:
  void lock() NORIA_ACQUIRE() { mutex_.lock(); }
  void unlock() NORIA_RELEASE() { mutex_.unlock(); }

 private:
  friend class Condition;
  std::mutex mutex_;
};

class NORIA_THREAD_ANNOTATION(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) NORIA_ACQUIRE(mutex) : mutex_(mutex) { mutex.lock(); }
  ~MutexLock() NORIA_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;  // a lock is released once
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

/// A wait may end without a call of `notify_all`. So wait in a loop that asks for what is awaited.
class Condition {
 public:
  void wait(Mutex& mutex) NORIA_REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    changed_.wait(lock);
    lock.release();
  }
  /// Returns false once the time is over.
  template <class Clock, class Duration>
  bool wait_until(Mutex& mutex, const std::chrono::time_point<Clock, Duration>& time) NORIA_REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    const std::cv_status status = changed_.wait_until(lock, time);
    lock.release();
    return status == std::cv_status::no_timeout;
  }
  void notify_all() { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

}  // namespace noria
