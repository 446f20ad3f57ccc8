#include <atomic>
#include <cerrno>
#include <exception>
#include <utility>

#include <unistd.h>

#include "base/errors.h"
#include "base/mutex.h"
#include "device/file_door.h"
#include "device/file_request.h"
#include "device/host_lane.h"

namespace noria {
namespace {

class ThreadDoor final : public FileDoor {
 public:
  explicit ThreadDoor(const FileDoorOptions& options) : faults_(options.faults) {
    for (int thread = 0; thread < options.depth; ++thread) {
      lanes_.push_back(std::make_unique<HostLane>("file " + std::to_string(thread)));
    }
  }

  std::string name() const override { return "threads"; }

  void run(FileWay way, std::vector<FilePart>& parts) override {
    const MutexLock turn(turn_);
    next_ = 0;
    const std::size_t num_threads = std::min(lanes_.size(), parts.size());
    for (std::size_t thread = 0; thread < num_threads; ++thread) {
      lanes_[thread]->enqueue({[this, way, &parts] { do_next(way, parts); },
                               [this](const std::exception_ptr& error) { note_failure(error); }});
    }
    for (std::size_t thread = 0; thread < num_threads; ++thread) lanes_[thread]->idle();
    const MutexLock lock(mutex_);
    if (std::exception_ptr failure = std::exchange(failure_, nullptr)) std::rethrow_exception(failure);
  }

 private:
  void do_next(FileWay way, std::vector<FilePart>& parts) {
    try {
      for (std::size_t part = next_++; part < parts.size() && !has_failed(); part = next_++) {
        FileRequest request(way, parts[part], *faults_);
        while (!request.end(answer(way, request))) {
        }
      }
    } catch (...) {
      note_failure(std::current_exception());
    }
  }

  static std::int64_t answer(FileWay way, FileRequest& request) {
    if (const std::int64_t fault = request.begin(); fault != 0) return fault;
    const auto bytes = static_cast<std::size_t>(request.bytes().count);
    const ssize_t got = way == FileWay::read
                            ? pread(request.descriptor(), request.memory(), bytes, request.offset().count)
                            : pwrite(request.descriptor(), request.memory(), bytes, request.offset().count);
    return got < 0 ? -errno : got;
  }

  bool has_failed() {
    const MutexLock lock(mutex_);
    return failure_ != nullptr;
  }

  void note_failure(const std::exception_ptr& error) {
    const MutexLock lock(mutex_);
    if (!failure_) failure_ = error;
  }

  const std::shared_ptr<FileFaults> faults_;
  std::vector<std::unique_ptr<HostLane>> lanes_;
  Mutex turn_;
  std::atomic<std::size_t> next_ = 0;  // part that no thread has begun
  Mutex mutex_;
  std::exception_ptr failure_ NORIA_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<FileDoor> make_thread_door(const FileDoorOptions& options) {
  NORIA_INVARIANT(options.depth > 0, "a door does at least one request at a time");
  return std::make_unique<ThreadDoor>(options);
}

}  // namespace noria
