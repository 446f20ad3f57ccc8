// gloo for the pretend GPU's NCCL: its calls, waited for on a stream's thread, until a thread aborts them.
//
// Ownership: a collective of gloo cannot be aborted, and gloo's destructor waits for those that run. So a group that is
//   aborted is left to itself, with the tensors of that call; hence those are copies. Threads: any.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace pretend_gpu {

class Gloo {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;

  Gloo(c10::intrusive_ptr<c10d::Backend> collectives, c10::intrusive_ptr<c10d::Backend> pairs,
       std::chrono::milliseconds timeout);
  ~Gloo();

  int rank() const { return collectives->getRank(); }
  std::int64_t timeout_ms() const { return timeout_ms_; }
  void set_timeout(std::chrono::milliseconds timeout);

  /// For calls, which are handed to `finish`. Collectives come from one stream at a time, sends and receives of `pairs`
  /// from several.
  const c10::intrusive_ptr<c10d::Backend> collectives, pairs;

  /// Returns when it is over. Throws what it has failed with, or that the group was aborted.
  void finish(const Work& work);
  /// The same for a send or receive, which runs on the calling thread.
  void finish_pair(const Work& work);

  void abort();
  bool is_aborted() const { return is_aborted_; }
  /// The first failure stays; empty: none.
  void fail(const std::string& text);
  std::string failure() const;

 private:
  std::atomic<std::int64_t> timeout_ms_;
  std::atomic<bool> is_aborted_{false};
  mutable std::mutex mutex_;  // protects all below
  std::string failure_;
  std::set<c10d::Work*> pairs_under_way_;
};

}  // namespace pretend_gpu
