// Without liburing (NORIA_HAS_URING) only the reason is left.
#include <string>

#include "base/errors.h"
#include "device/file_door.h"

#ifdef NORIA_HAS_URING
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <exception>

#include <liburing.h>
#include <unistd.h>

#include "base/mutex.h"
#include "device/file_request.h"
#endif

namespace noria {

#ifdef NORIA_HAS_URING
namespace {

constexpr Bytes kMostInOneBuffer{std::int64_t{1} << 30};  // the kernel's limit for memory that is registered

std::string text_of(int error) { return std::strerror(error < 0 ? -error : error); }

struct Answer {
  std::size_t request;
  std::int64_t value;
};

class UringDoor final : public FileDoor {
 public:
  explicit UringDoor(const FileDoorOptions& options)
      : depth_(static_cast<std::size_t>(options.depth)),
        faults_(options.faults) {
    const int error = io_uring_queue_init(static_cast<unsigned>(options.depth), &ring_, 0);
    if (error < 0) throw MachineError("io_uring with " + std::to_string(depth_) + " entries failed: " + text_of(error));
  }
  ~UringDoor() override {
    if (getpid() == pid_) io_uring_queue_exit(&ring_);
  }

  std::string name() const override { return "io_uring"; }

  std::string expect_memory(std::byte* memory, Bytes bytes) override {
    const MutexLock turn(turn_);
    if (memory_ != nullptr) io_uring_unregister_buffers(&ring_);
    memory_ = nullptr;
    if (memory == nullptr) return {};
    std::vector<iovec> buffers;
    for (Bytes at; at < bytes; at += kMostInOneBuffer) {
      buffers.push_back({memory + at.count, static_cast<std::size_t>(std::min(kMostInOneBuffer, bytes - at).count)});
    }
    const int error = io_uring_register_buffers(&ring_, buffers.data(), static_cast<unsigned>(buffers.size()));
    if (error < 0) {
      return "registering " + to_string(bytes) + " with io_uring failed: " + text_of(error) + " (ulimit -l)";
    }
    memory_ = memory;
    expected_ = bytes;
    return {};
  }

  void run(FileWay way, std::vector<FilePart>& parts) override {
    if (getpid() != pid_) throw MachineError("files of a wrapped model belong to the parent process");
    const MutexLock turn(turn_);
    std::vector<FileRequest> requests;
    std::deque<std::size_t> waiting;  // to be asked for next
    requests.reserve(parts.size());
    for (FilePart& part : parts) {
      waiting.push_back(requests.size());
      requests.emplace_back(way, part, *faults_);
    }
    std::exception_ptr failure;
    const auto take = [&](const Answer& answer) {
      try {
        if (!requests[answer.request].end(answer.value)) waiting.push_front(answer.request);
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    };
    std::size_t num_under_way = 0;
    std::deque<Answer> answers;  // to be taken
    while (num_under_way > 0 || !answers.empty() || (!waiting.empty() && !failure)) {
      while (num_under_way < depth_ && !waiting.empty() && !failure) {
        const std::size_t request = waiting.front();
        waiting.pop_front();
        if (const std::int64_t fault = requests[request].begin(); fault != 0) {
          take({request, fault});
          continue;
        }
        ask(way, requests[request], request);
        ++num_under_way;
        submit(0);  // the disk works on it while the next one's checksum is taken
      }
      if (answers.empty() && num_under_way > 0) submit(1);
      io_uring_cqe* answer = nullptr;
      while (io_uring_peek_cqe(&ring_, &answer) == 0) {
        answers.push_back({static_cast<std::size_t>(io_uring_cqe_get_data64(answer)), answer->res});
        io_uring_cqe_seen(&ring_, answer);
        --num_under_way;
      }
      // To take the answer of a read is to take a checksum. What has become free is asked for first, above.
      if (!answers.empty() && (num_under_way == depth_ || waiting.empty() || failure)) {
        take(answers.front());
        answers.pop_front();
      }
    }
    if (failure) std::rethrow_exception(failure);
  }

 private:
  void ask(FileWay way, const FileRequest& request, std::size_t number) NORIA_REQUIRES(turn_) {
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
    NORIA_INVARIANT(entry != nullptr, "the ring has an entry for each request that is under way");
    const auto bytes = static_cast<unsigned>(request.bytes().count);
    const auto offset = static_cast<std::uint64_t>(request.offset().count);
    const int buffer = buffer_of(request);
    if (buffer >= 0) {
      if (way == FileWay::read) {
        io_uring_prep_read_fixed(entry, request.descriptor(), request.memory(), bytes, offset, buffer);
      } else {
        io_uring_prep_write_fixed(entry, request.descriptor(), request.memory(), bytes, offset, buffer);
      }
    } else if (way == FileWay::read) {
      io_uring_prep_read(entry, request.descriptor(), request.memory(), bytes, offset);
    } else {
      io_uring_prep_write(entry, request.descriptor(), request.memory(), bytes, offset);
    }
    io_uring_sqe_set_data64(entry, number);
  }

  // Returns the number of the registered buffer that has the whole request; -1: none.
  int buffer_of(const FileRequest& request) const NORIA_REQUIRES(turn_) {
    if (memory_ == nullptr || request.memory() < memory_) return -1;
    const Bytes begin{request.memory() - memory_};
    const Bytes end = begin + request.bytes();
    const std::int64_t buffer = begin.count / kMostInOneBuffer.count;
    return end <= expected_ && end <= kMostInOneBuffer * (buffer + 1) ? static_cast<int>(buffer) : -1;
  }

  // Gives the kernel what has been asked for. Then waits until `answers` more requests have been answered.
  void submit(unsigned answers) NORIA_REQUIRES(turn_) {
    while (true) {
      const int error = io_uring_submit_and_wait(&ring_, answers);
      if (error >= 0) return;
      // The kernel may still be using the memory of what is under way, so the call cannot end here.
      NORIA_INVARIANT(error == -EINTR || error == -EAGAIN || error == -EBUSY, "io_uring: " + text_of(error));
      if (answers == 0) return;  // what it did not take is given to it again by the next call
    }
  }

  const pid_t pid_ = getpid();
  const std::size_t depth_;
  const std::shared_ptr<FileFaults> faults_;
  Mutex turn_;
  io_uring ring_ NORIA_GUARDED_BY(turn_){};
  std::byte* memory_ NORIA_GUARDED_BY(turn_) = nullptr;  // registered
  Bytes expected_ NORIA_GUARDED_BY(turn_);
};

}  // namespace

std::string uring_absent_reason() {
  static const std::string reason = [] {
    io_uring ring{};
    const int error = io_uring_queue_init(2, &ring, 0);
    if (error == 0) io_uring_queue_exit(&ring);
    return error == 0 ? "" : "the kernel refuses io_uring: " + text_of(error);
  }();
  return reason;
}

std::unique_ptr<FileDoor> make_uring_door(const FileDoorOptions& options) {
  NORIA_INVARIANT(options.depth > 0, "a door does at least one request at a time");
  if (const std::string reason = uring_absent_reason(); !reason.empty()) throw MachineError(reason);
  return std::make_unique<UringDoor>(options);
}

#else

std::string uring_absent_reason() { return "noria was built without liburing"; }

std::unique_ptr<FileDoor> make_uring_door(const FileDoorOptions& /*options*/) {
  throw MachineError(uring_absent_reason());
}

#endif

}  // namespace noria
