// FileHome gives the records of a FileStore addresses that never change. At its address a record has memory while it
// has a slot; otherwise an access there ends the process. So pointers and tensors may point to it all the time.
//
// Units: bytes.
// Ownership: owns its slots and files. The addresses live as long as any tensor over `addresses()`.
// Order: a slot serves one record at a time. The caller orders what reads and writes a slot's memory, `bring` and
//   `put_back` included.
// Threads: `bring` on one thread, `put_back` on one; the rest as the caller orders it. A forked child does not inherit
//   the memory.
//
// Note [Two mappings]. A slot's pages have an address of their own, where files are read and written. While a record
// has the slot, they have the record's address too. So no bytes are copied between slots and records. The first slots
// lie side by side, so that a door can register them once.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <unistd.h>

#include "base/bytes.h"
#include "base/mutex.h"
#include "store/arena.h"
#include "store/file_store.h"

namespace noria {

/// Pages that can be mapped at several addresses. They have one here.
class SharedPages {
 public:
  /// Throws MachineError if the machine has too little memory.
  explicit SharedPages(Bytes bytes);
  ~SharedPages();
  SharedPages(const SharedPages&) = delete;  // owns a mapping
  SharedPages& operator=(const SharedPages&) = delete;

  std::byte* data() const { return data_; }
  int descriptor() const { return descriptor_; }

 private:
  const Bytes bytes_;
  const pid_t process_ = getpid();
  int descriptor_ = -1;
  std::byte* data_ = nullptr;
};

class FileHome {
 public:
  /// Takes the space of all records in the files, and `num_slots` slots for the largest of them. Throws UsageError or
  /// MachineError if there is too little; then nothing is taken.
  FileHome(const std::vector<std::string>& folders, const std::vector<Bytes>& sizes, int num_slots,
           const FileStoreOptions& options = {});
  ~FileHome();
  FileHome(const FileHome&) = delete;  // owns mappings
  FileHome& operator=(const FileHome&) = delete;

  /// Returns the address space of all records. It holds no memory by itself.
  const std::shared_ptr<Arena>& addresses() const { return addresses_; }
  /// Returns where a record begins in it.
  Bytes offset_of(int record) const { return offsets_[static_cast<std::size_t>(record)]; }
  Bytes bytes_of(int record) const { return store_.bytes_of(record); }
  int num_records() const { return static_cast<int>(offsets_.size()); }
  Bytes slot_bytes() const { return slot_bytes_; }
  int num_slots() const;
  const FileStore& store() const { return store_; }

  /// Takes one more slot. Throws MachineError if the machine has too little memory.
  void add_slot() { add_slots(1); }
  /// Gives back the last slots, until `left` are there. Their records must have been put back.
  void drop_slots(int left);

  /// Reads a record into a slot, and gives the slot its address. The record that had the slot loses its own.
  /// `is_blank`: the record gets zeros, and its file is not read. Throws the errors of FileStore::read; then no record
  /// has the slot.
  void bring(int record, int slot, bool is_blank);
  /// Writes the slot's record to its file. Throws what FileStore::write throws.
  void put_back(int record, int slot);

 private:
  struct Slot {
    std::shared_ptr<SharedPages> pages;
    Bytes from;  // where it begins in them
    std::optional<int> record;
    std::byte* memory() const { return pages->data() + from.count; }
  };
  void add_slots(int count);
  Slot& at(int slot);
  void vacate(Slot& slot);

  FileStore store_;
  std::vector<Bytes> offsets_;
  std::shared_ptr<Arena> addresses_;
  Bytes slot_bytes_;
  const pid_t process_ = getpid();
  mutable Mutex mutex_;
  std::deque<Slot> slots_ NORIA_GUARDED_BY(mutex_);  // a slot stays where it is when others come and go
};

}  // namespace noria
