// FileStore keeps records in scratch files: ranges of bytes of fixed size, such as the optimizer's state of a unit.
//
// Units: bytes. A record takes a multiple of kFileAlignment in the files, and in memory too.
// Ownership: owns its files; nothing of them is left when it ends. The caller owns all memory.
// Order: `add` all records, then `reserve`, then read and write. One record must not be written while it is read or
//   written.
// Threads: any thread may call `read` and `write`. Two reads take turns, and so do two writes.
//
// Note [Whole or torn]. Each part of a record has a checksum, which is taken as the part is written and compared when
// it is read. A write that fails leaves the record torn: reading it raises until it has been written again. A record
// that was never written reads as zeros, without a look at the file.
//
// Note [Stripes]. A record is cut into parts of `part` bytes. They go to the files in turns, so that several disks work
// at once. Each record begins with another file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "device/file_door.h"
#include "device/scratch_file.h"

namespace noria {

enum class DoorKind : std::uint8_t { best, uring, threads };

struct FileStoreOptions {
  DoorKind door = DoorKind::best;     // best: io_uring if it can be used
  int depth = 16;                     // requests that are under way at once, each way
  Bytes part{std::int64_t{1} << 20};  // a multiple of kFileAlignment
  std::shared_ptr<FileFaults> faults = std::make_shared<FileFaults>();
};

class FileStore {
 public:
  /// Makes a file in each folder: see ScratchFile. Throws UsageError if a folder is not fit.
  explicit FileStore(const std::vector<std::string>& folders, const FileStoreOptions& options = {});

  /// Adds a record of `bytes`, rounded up to kFileAlignment. Returns its number: 0, 1, 2...
  int add(Bytes bytes);
  /// Takes the space of all records. Throws UsageError if a file system has too little.
  void reserve();

  /// Blocks. Throws MachineError if the machine fails, if the record is torn, or if the bytes have changed since they
  /// were written. What is in `memory` then means nothing.
  void read(int record, std::byte* memory);
  /// Blocks. Throws MachineError if the machine fails; then the record is torn.
  void write(int record, const std::byte* memory);

  /// Returns the size of a record, as it is read and written.
  Bytes bytes_of(int record) const { return records_[static_cast<std::size_t>(record)].bytes; }
  Bytes file_bytes() const;  // of all files
  /// Most reads and writes will use this memory: see FileDoor::expect_memory.
  void expect_memory(std::byte* memory, Bytes bytes);
  std::string door_name() const { return reader_->name(); }
  /// Returns why files are read and written more slowly than they could be: io_uring, O_DIRECT or registered memory
  /// were refused. By folder if it is one's own reason.
  std::vector<std::string> notes() const;

 private:
  struct Record {
    Bytes bytes;
    std::vector<FilePart> parts;  // without memory; `sum` is what was written
    bool is_written = false;
    bool is_torn = false;
  };
  std::vector<FilePart> parts_in(const Record& record, std::byte* memory) const;
  Record& at(int record);

  const FileStoreOptions options_;
  std::vector<ScratchFile> files_;
  std::vector<Bytes> ends_;  // by file: where the next part begins
  std::unique_ptr<FileDoor> reader_, writer_;
  std::vector<Record> records_;
  std::string why_no_uring_, why_not_registered_;
};

}  // namespace noria
