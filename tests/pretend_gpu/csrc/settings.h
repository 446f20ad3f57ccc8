// How the pretend GPU behaves where a test may choose, and what it counts.
//
// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace pretend_gpu {

struct Settings {
  std::atomic<bool> poison{true};  // memory is overwritten, in the order of its stream, when it is given out
  std::atomic<bool> writes_everything{false};  // kernels ask for every pointer without const, as compiled code does
  std::atomic<int> threads{1};                 // of torch, for the kernels of a stream
  std::atomic<int> sync_debug_mode{0};         // torch.cuda.set_sync_debug_mode: 0 nothing, 1 warn, 2 raise
};
Settings& settings();

/// What has been launched.
class Launches {
 public:
  /// Of an operator that runs behind the host's back.
  void launched(const std::string& name);
  void finished();
  /// Of an operator that waits for the device.
  void synchronized(const std::string& name);
  /// A kernel reads or writes host memory itself, over the link.
  void crossed_link(std::int64_t bytes_read, std::int64_t bytes_written);

  struct Seen {
    std::map<std::string, std::int64_t> asynchronous, synchronous;
    std::int64_t most_ahead = 0, link_bytes_read = 0, link_bytes_written = 0;
  };
  Seen seen() const;
  void reset();

 private:
  mutable std::mutex mutex_;
  Seen seen_;
  std::int64_t launched_ = 0, finished_ = 0;
};
Launches& launches();

}  // namespace pretend_gpu
