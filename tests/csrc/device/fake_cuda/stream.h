// A stream of the fake runtime: a queue of work, and a thread that does it in order.
//
// Units: positions count what was queued on a stream, from 1; a stream has passed a position when all up to it is done.
// Order: eager (the default), a stream does what it has as soon as it can. Lazy, it does nothing until a thread
//   waits for it, and then only what that wait needs: waiting says up to which position. A stream that waits for
//   another one's position waits by the same call, and so passes the demand on.
// Threads: any may queue and wait, but for the stream's own, which only works. No thread holds a lock while it blocks,
//   and work runs, and is destroyed, under none.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace fake_cuda {

/// How streams go, all of them.
struct Pace {
  std::atomic<bool> is_lazy{false};
  std::atomic<std::uint64_t> seed{0};
  std::atomic<std::int64_t> max_delay_us{0};  // before a kernel or a copy, at random up to this
  std::atomic<int> delayed_percent{25};       // of them
  std::atomic<bool> is_stopping{false};       // the process ends: queued work is dropped, and no thread waits any more

  /// Threads that only watch, by name: their waits count only if no other thread has wanted the work for a while.
  void set_observers(std::vector<std::string> names);
  bool is_observer();

 private:
  std::mutex mutex_;
  std::vector<std::string> observers_;
};
Pace& pace();

/// How often a host thread has waited for a stream, by reason.
struct Waits {
  std::atomic<std::int64_t> by_host{0};     // synchronised with a stream, an event or a device that was not done
  std::atomic<std::int64_t> full_queue{0};  // launched where all slots were taken
};
Waits& waits();

enum class WorkKind {
  kernel,  // takes a slot of the launch queue, and may be late
  note,    // takes a slot: records and waits
  free,    // what a real device would not have to be told
};

/// What a launch queue holds before the launching thread has to wait, as on a device.
inline constexpr int kQueueSlots = 1024;
/// Asking so often whether something is done counts as waiting for it.
inline constexpr int kPatientPolls = 64;

}  // namespace fake_cuda

struct CUstream_st : std::enable_shared_from_this<CUstream_st> {
 public:
  using Work = std::function<void()>;

  /// `is_patient`: it does not wait for others' demand, and what it waits for it does not want at once. So goes a
  /// stream of collectives, for which another process may wait.
  static std::shared_ptr<CUstream_st> start(int device, bool is_patient = false);

  int device() const { return device_; }

  /// Its position. Waits while all slots are taken.
  std::uint64_t enqueue(Work work, fake_cuda::WorkKind kind);
  /// The position of what was queued last.
  std::uint64_t end() const;
  bool has_passed(std::uint64_t position) const;
  /// As `has_passed`, but who asks again and again wants it to happen.
  bool poll(std::uint64_t position);
  /// True if the caller had to wait.
  bool wait_until(std::uint64_t position);
  /// What is queued is still done, behind the caller's back; then the thread ends.
  void close();
  /// Looks again whether there is something to do, after a change of pace.
  void wake();
  /// Only when all streams stop.
  void await_ended();

 private:
  struct Item {
    Work work;
    fake_cuda::WorkKind kind;
    std::int64_t delay_us;
  };

  CUstream_st(int device, bool is_patient);
  void serve();
  bool may_run() const;
  void want(std::uint64_t position);
  std::int64_t next_delay_us();

  const int device_;
  const bool is_patient_;
  const std::uint64_t number_;

  mutable std::mutex mutex_;  // protects all below
  std::condition_variable changed_;
  std::deque<Item> queue_;
  std::uint64_t queued_ = 0, done_ = 0, wanted_ = 0;
  int slots_taken_ = 0, polls_ = 0;
  bool is_closing_ = false, has_ended_ = false;
  std::uint64_t seeded_with_ = ~std::uint64_t{0};
  std::mt19937_64 random_;
};

namespace fake_cuda {

/// One recording of an event: a position in a stream.
struct Record {
  std::shared_ptr<CUstream_st> stream;
  std::uint64_t position = 0;
  std::atomic<std::int64_t> reached_ns{0};  // by the host's clock

  bool is_done() const { return stream->has_passed(position); }
};

}  // namespace fake_cuda
