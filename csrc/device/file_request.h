// FileRequest follows one part of a file through its requests, until all of its bytes are read or written. Both doors
// (device/file_door.h) ask the machine and tell it the answers.
//
// Ownership: borrows the part and the faults.
// Order: `begin`, the machine's answer, `end`; again until `end` returns true.
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "device/file_door.h"

namespace noria {

class FileRequest {
 public:
  FileRequest(FileWay way, FilePart& part, FileFaults& faults);

  /// Begins the next request. Returns the answer if a fault answers it; 0: ask the machine. May sleep, if the machine
  /// had no resources for the last one.
  std::int64_t begin();
  /// Takes the answer: how many bytes, or a negative errno. Returns true if the part is done. Throws MachineError if
  /// asking again would not help.
  bool end(std::int64_t answer);

  // ---- the request that has begun ----
  int descriptor() const { return part_.file->descriptor; }
  std::byte* memory() const { return part_.memory + done_.count; }
  Bytes offset() const { return part_.offset + done_; }
  Bytes bytes() const { return asked_; }

 private:
  [[noreturn]] void fail(const std::string& why) const;

  const FileWay way_;
  FilePart& part_;
  FileFaults& faults_;
  Bytes done_, asked_;
  int num_in_vain_ = 0;  // answers in a row that brought nothing
};

}  // namespace noria
