// FileDoor reads and writes parts of files, several at once. All bytes of the home that lie in files pass through it.
//
// Units: bytes.
// Ownership: borrows files and memory; they must stay until `run` returns.
// Order: the parts of a call are done in any order, so they must not overlap.
// Threads: any thread may call every member; calls take turns. A forked child cannot use the door: `run` throws.
//
// Note [All or an error]. `run` returns when all parts are done. An answer that is short is asked for again from there
// on, and so is one that an interruption or a lack of resources stopped. After any other failure the door asks for no
// more. It waits for requests that are under way, because the machine may still be using their memory. Then it throws
// the first failure. It is then unknown which parts were done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.h"

namespace noria {

enum class FileWay : std::uint8_t { read, write };

/// Describes an open file, for a door. If `is_direct`, reads and writes bypass the page cache (O_DIRECT).
struct FileToUse {
  int descriptor = -1;
  std::string name;  // for error messages
  bool is_direct = false;
};

/// Offsets, memory and sizes of direct reads and writes are multiples of this. No disk that we know asks for more.
inline constexpr Bytes kFileAlignment{4096};

/// Describes a part of a file, and the memory that it goes to or comes from.
struct FilePart {
  const FileToUse* file = nullptr;
  Bytes offset;
  std::byte* memory = nullptr;
  Bytes bytes;
  std::uint64_t sum = 0;  // `run` sets it to the checksum of what it has written or read
};

/// Says what goes wrong with requests. Here nothing does. Tests use another one (testing/file_faults.h).
///
/// Threads: any thread may call every member.
class FileFaults {
 public:
  virtual ~FileFaults() = default;
  /// Returns how many of `bytes` the next request asks for: fewer give a short answer. A negative number is an errno,
  /// with which the request fails without reaching the machine.
  virtual std::int64_t asks_for(FileWay /*way*/, const FilePart& /*part*/, Bytes bytes) { return bytes.count; }
};

class FileDoor {
 public:
  virtual ~FileDoor() = default;
  FileDoor() = default;
  FileDoor(const FileDoor&) = delete;  // owns threads or a ring
  FileDoor& operator=(const FileDoor&) = delete;

  virtual std::string name() const = 0;  // "io_uring", "threads"
  /// Reads or writes all parts, and sets their sums. Blocks. Throws MachineError: see the Note.
  virtual void run(FileWay way, std::vector<FilePart>& parts) = 0;
  /// Tells the door that most parts will use this memory, so that the machine may pin it once and not for each request.
  /// The memory must stay as long as the door, or until this is called again. Returns why the machine refused, or an
  /// empty string. Null: no memory.
  virtual std::string expect_memory(std::byte* /*memory*/, Bytes /*bytes*/) { return {}; }
};

struct FileDoorOptions {
  int depth = 16;  // how many requests are under way at once
  std::shared_ptr<FileFaults> faults = std::make_shared<FileFaults>();
};

/// Throws MachineError with the reason of `uring_absent_reason`, or if the machine has no room for the ring.
std::unique_ptr<FileDoor> make_uring_door(const FileDoorOptions& options = {});
/// Makes a door of `depth` threads, which read and write with pread and pwrite.
std::unique_ptr<FileDoor> make_thread_door(const FileDoorOptions& options = {});

/// Returns why no door can use io_uring: noria was built without liburing, or the kernel refuses. Empty if one can.
std::string uring_absent_reason();

}  // namespace noria
