// FileStore keeps records in scratch files: ranges of bytes of fixed size, such as the optimizer's state of a unit. A
// mapped record has addresses, too: who reads or writes memory there reads or writes the file, through the page cache.
//
// Units: bytes. A record takes a multiple of kFileAlignment in the files, and in memory too.
// Ownership: owns its files; nothing of them is left when it ends. The caller owns all memory. An arena over which
//   records are mapped lives as long as the store.
// Order: `add` all records, then `reserve`, then `map`, then read and write. One record must not be written while it is
//   read or written.
// Threads: any thread may call what follows `forget_mappings` below. Two reads take turns, and so do two writes.
//
// Note [Whole or torn]. Each part of a record has a checksum, which is taken as the part is written and compared when
// it is read. A write that fails leaves the record torn: reading it raises until it has been written again. A record
// that was never written reads as zeros, without a look at the file.
//
// Note [Stripes]. A record is cut into parts of `part` bytes. They go to the files in turns, so that several disks work
// at once. Each such record begins with another file. A mapped record has one range in each file, for each range needs
// a mapping of its own, and a process has few of them. Its parts are read from the files in turns, too.
//
// Note [Mapped writes]. The store does not see them, so the caller tells it. The next read first waits until they have
// reached the file. It takes the checksums anew, and gives back what the page cache has of the record. So who may have
// read the record first compares it (`check`): a changed bit would count as a write. If the machine could not write, it
// says so once, and forgets. So all records with such writes are torn then. So is a mapped record whose checksum
// differs. They stay torn until the caller has written all of them again, and says so (`clear_torn`).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/mutex.h"
#include "device/file_door.h"
#include "device/pace.h"
#include "device/scratch_file.h"
#include "store/arena.h"

namespace noria {

enum class DoorKind : std::uint8_t { best, uring, threads };

struct FileStoreOptions {
  DoorKind door = DoorKind::best;     // best: io_uring if it can be used
  int depth = 16;                     // requests that are under way at once, each way
  Bytes part{std::int64_t{1} << 20};  // a multiple of kFileAlignment
  std::shared_ptr<FileFaults> faults = std::make_shared<FileFaults>();
  std::shared_ptr<Pace> pace = std::make_shared<Pace>();  // of the lanes that move records
};

class FileStore {
 public:
  /// Makes a file in each folder: see ScratchFile. Throws UsageError if a folder is not fit.
  explicit FileStore(const std::vector<std::string>& folders, const FileStoreOptions& options = {});

  /// Adds a record of `bytes`, rounded up to kFileAlignment. Returns its number: 0, 1, 2...
  int add(Bytes bytes);
  /// Adds a record that can be mapped.
  int add_mapped(Bytes bytes);
  /// Takes the space of all records. Throws UsageError if a file system has too little.
  void reserve();
  /// Maps a record over addresses of the arena, from `offset` on: a multiple of a page. Throws MachineError if the
  /// machine refuses.
  void map(int record, const std::shared_ptr<Arena>& arena, Bytes offset);
  /// Something else has the addresses of records from this one on.
  void forget_mappings(int first);
  /// Memory that is mapped from the record has been written, or will be until its next read. A torn record stays torn.
  void note_mapped_write(int record);
  /// All of a mapped record has been written again.
  void clear_torn(int record);
  struct Loss {
    int times = 0;    // that the record was torn
    std::string why;  // it is torn; empty: it is whole
  };
  Loss loss(int record) const;
  bool is_any_torn() const;

  /// Blocks. Throws MachineError if the machine fails, if the record is torn, or if the bytes have changed since they
  /// were written. What is in `memory` then means nothing.
  void read(int record, std::byte* memory);
  /// Blocks, and throws, as `read`, without memory of the caller's. If the record was written through its mapping since
  /// its last read, there is nothing to compare: `awaits_writes` waits until that has reached the file.
  void check(int record, bool awaits_writes);
  /// Blocks. Throws MachineError if the machine fails; then the record is torn.
  void write(int record, const std::byte* memory);

  /// Returns the size of a record, as it is read and written.
  Bytes bytes_of(int record) const { return records_[static_cast<std::size_t>(record)].bytes; }
  Bytes file_bytes() const;  // of all files
  const std::shared_ptr<Pace>& pace() const { return options_.pace; }
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
    std::vector<Bytes> offsets;   // by part: where it begins in the record
    bool is_written = false;
    Loss loss;                     // guarded by `mutex_`
    bool is_sealed = true;         // guarded by `mutex_`; false: the sums are not those of the bytes
    std::vector<FilePart> mapped;  // the ranges of a mapped record; `memory` is where, or null
  };
  void add_part(Record& record, std::size_t file, Bytes at, Bytes bytes);
  /// Returns whether the record is sealed. Throws MachineError if it is torn.
  bool is_sealed(const Record& record, int number) const;
  static std::string why_torn(const Record& record, int number);
  void mark_torn(Record& record, const std::string& why) NORIA_REQUIRES(mutex_);
  void refuse_changed(Record& record, std::size_t first, const std::vector<FilePart>& found);
  void flush(const Record& record, int number);
  static void forget_cached(const Record& record);
  std::vector<FilePart> parts_in(const Record& record, std::byte* memory) const;
  Record& at(int record);
  const Record& at(int record) const;

  const FileStoreOptions options_;
  std::vector<ScratchFile> files_;
  std::vector<Bytes> ends_;  // by file: where the next part begins
  std::unique_ptr<FileDoor> reader_, writer_;
  mutable Mutex mutex_;
  int num_torn_ NORIA_GUARDED_BY(mutex_) = 0;
  std::vector<Record> records_;
  std::set<std::shared_ptr<Arena>> arenas_;  // over whose addresses records are mapped
  std::string why_no_uring_, why_not_registered_;
};

}  // namespace noria
