#include "store/file_store.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/errors.h"

namespace noria {
namespace {

std::unique_ptr<FileDoor> make_door(const FileStoreOptions& options, bool with_uring) {
  const FileDoorOptions of_door{options.depth, options.faults};
  return with_uring ? make_uring_door(of_door) : make_thread_door(of_door);
}

}  // namespace

FileStore::FileStore(const std::vector<std::string>& folders, const FileStoreOptions& options) : options_(options) {
  NORIA_INVARIANT(!folders.empty(), "a file store has a folder");
  NORIA_INVARIANT(options.part > Bytes{0} && options.part.count % kFileAlignment.count == 0, "parts are aligned");
  for (const std::string& folder : folders) files_.emplace_back(folder);
  ends_.resize(files_.size());
  if (options.door == DoorKind::best) why_no_uring_ = uring_absent_reason();
  const bool with_uring = options.door == DoorKind::uring || (options.door == DoorKind::best && why_no_uring_.empty());
  reader_ = make_door(options, with_uring);
  writer_ = make_door(options, with_uring);
}

int FileStore::add(Bytes bytes) {
  NORIA_INVARIANT(bytes > Bytes{0}, "a record has bytes");
  const auto number = static_cast<int>(records_.size());
  Record& record = records_.emplace_back();
  record.bytes = align_up(bytes, kFileAlignment);
  auto file = static_cast<std::size_t>(number);
  for (Bytes at; at < record.bytes; at += options_.part, ++file) {
    add_part(record, file % files_.size(), at, std::min(options_.part, record.bytes - at));
  }
  return number;
}

int FileStore::add_mapped(Bytes bytes) {
  NORIA_INVARIANT(bytes > Bytes{0} && bytes.count % kFileAlignment.count == 0, "a mapped record has whole pages");
  const auto number = static_cast<int>(records_.size());
  Record& record = records_.emplace_back();
  record.bytes = bytes;
  record.is_written = true;  // its first bytes come by the mapping
  record.is_sealed = false;
  const auto num_files = static_cast<std::int64_t>(files_.size());
  const Bytes page = std::max(kFileAlignment, Bytes{sysconf(_SC_PAGESIZE)});
  const Bytes most = align_up(Bytes{(bytes.count + num_files - 1) / num_files}, page);
  for (std::size_t file = 0; file < files_.size(); ++file) {
    FilePart range;
    const Bytes at = most * static_cast<std::int64_t>(record.mapped.size());
    range.file = &files_[file].to_use();
    range.offset = ends_[file];
    range.bytes = std::min(most, bytes - at);
    if (range.bytes > Bytes{0}) record.mapped.push_back(range);
  }
  for (Bytes at; at < most; at += options_.part) {
    for (std::size_t file = 0; file < record.mapped.size(); ++file) {
      const Bytes left = record.mapped[file].bytes - at;
      if (left > Bytes{0})
        add_part(record, file, most * static_cast<std::int64_t>(file) + at, std::min(options_.part, left));
    }
  }
  return number;
}

void FileStore::add_part(Record& record, std::size_t file, Bytes at, Bytes bytes) {
  FilePart& part = record.parts.emplace_back();
  part.file = &files_[file].to_use();
  part.offset = ends_[file];
  part.bytes = bytes;
  record.offsets.push_back(at);
  ends_[file] += bytes;
}

void FileStore::reserve() {
  for (std::size_t file = 0; file < files_.size(); ++file) files_[file].reserve(ends_[file]);
}

void FileStore::map(int number, const std::shared_ptr<Arena>& arena, Bytes offset) {
  Record& record = at(number);
  arenas_.insert(arena);
  std::byte* address = arena->data() + offset.count;
  NORIA_INVARIANT(!record.mapped.empty(), "the record was added by add_mapped");
  for (FilePart& range : record.mapped) {
    const auto size = static_cast<std::size_t>(range.bytes.count);
    if (mmap(address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, range.file->descriptor,
             range.offset.count) == MAP_FAILED) {
      throw MachineError("mmap of " + to_string(range.bytes) + " of " + range.file->name +
                         " failed: " + std::strerror(errno));
    }
    madvise(address, size, MADV_DONTFORK);
    range.memory = address;
    address += size;
  }
}

void FileStore::forget_mappings(int first) {
  for (std::size_t number = static_cast<std::size_t>(first); number < records_.size(); ++number) {
    for (FilePart& range : records_[number].mapped) range.memory = nullptr;
  }
  if (first == 0) arenas_.clear();
}

void FileStore::note_mapped_write(int number) {
  const MutexLock lock(mutex_);
  at(number).is_sealed = false;
}

void FileStore::mark_torn(Record& record, const std::string& why) {
  if (record.loss.why.empty()) ++num_torn_;
  record.loss = {record.loss.times + 1, why};
}

void FileStore::clear_torn(int number) {
  const MutexLock lock(mutex_);
  std::string& why = at(number).loss.why;
  if (!why.empty()) --num_torn_;
  why.clear();
}

bool FileStore::is_any_torn() const {
  const MutexLock lock(mutex_);
  return num_torn_ > 0;
}

FileStore::Loss FileStore::loss(int number) const {
  const MutexLock lock(mutex_);
  return at(number).loss;
}

bool FileStore::is_sealed(const Record& record, int number) const {
  const MutexLock lock(mutex_);
  if (record.loss.why.empty()) return record.is_sealed;
  throw MachineError(why_torn(record, number));
}

std::string FileStore::why_torn(const Record& record, int number) {
  return "record " + std::to_string(number) + " in " + record.parts.front().file->name + " is torn: " + record.loss.why;
}

void FileStore::read(int number, std::byte* memory) {
  Record& record = at(number);
  const bool was_sealed = is_sealed(record, number);
  if (!record.is_written) {
    std::memset(memory, 0, static_cast<std::size_t>(record.bytes.count));
    return;
  }
  if (!was_sealed) flush(record, number);
  std::vector<FilePart> parts = parts_in(record, memory);
  reader_->run(FileWay::read, parts);
  if (was_sealed) {
    refuse_changed(record, 0, parts);
    return;
  }
  {
    const MutexLock lock(mutex_);
    if (!record.loss.why.empty()) throw MachineError(why_torn(record, number));  // meanwhile, by another `flush`
    for (std::size_t part = 0; part < parts.size(); ++part) record.parts[part].sum = parts[part].sum;
    record.is_sealed = true;
  }
  forget_cached(record);
}

void FileStore::check(int number, bool awaits_writes) {
  Record& record = at(number);
  if (!is_sealed(record, number)) {
    if (awaits_writes) flush(record, number);
    return;
  }
  if (!record.is_written) return;
  const auto at_once = static_cast<std::size_t>(options_.depth);
  const Arena memory(std::min(record.bytes, options_.part * options_.depth));
  for (std::size_t first = 0; first < record.parts.size(); first += at_once) {
    const auto begin = record.parts.begin() + static_cast<std::ptrdiff_t>(first);
    std::vector<FilePart> parts(begin,
                                begin + static_cast<std::ptrdiff_t>(std::min(at_once, record.parts.size() - first)));
    std::byte* to = memory.data();
    for (FilePart& part : parts) {
      part.memory = to;
      to += part.bytes.count;
    }
    reader_->run(FileWay::read, parts);
    refuse_changed(record, first, parts);
  }
}

void FileStore::refuse_changed(Record& record, std::size_t first, const std::vector<FilePart>& found) {
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i].sum == record.parts[first + i].sum) continue;
    std::string why = to_string(found[i].bytes) + " at offset " + std::to_string(found[i].offset.count) + " of " +
                      found[i].file->name + " are not what was written there: their checksum differs";
    if (!record.mapped.empty()) {
      why += ". Or a view that numpy() made of these weights was written late";
      const MutexLock lock(mutex_);
      mark_torn(record, why);
    }
    throw MachineError(why);
  }
}

void FileStore::write(int number, const std::byte* memory) {
  Record& record = at(number);
  // A door writes from memory that it does not change.
  std::vector<FilePart> parts = parts_in(record, const_cast<std::byte*>(memory));
  try {
    writer_->run(FileWay::write, parts);
  } catch (const std::exception& error) {
    const MutexLock lock(mutex_);
    mark_torn(record, std::string("an earlier write of it failed: ") + error.what());
    throw;
  }
  for (std::size_t part = 0; part < parts.size(); ++part) record.parts[part].sum = parts[part].sum;
  record.is_written = true;
  clear_torn(number);
}

std::vector<FilePart> FileStore::parts_in(const Record& record, std::byte* memory) const {
  std::vector<FilePart> parts = record.parts;
  for (std::size_t part = 0; part < parts.size(); ++part) parts[part].memory = memory + record.offsets[part].count;
  return parts;
}

void FileStore::flush(const Record& record, int number) {
  for (const FilePart& range : record.mapped) {
    const std::int64_t asked = options_.faults->asks_for(FileWay::write, range, range.bytes);
    int error = asked < 0 ? static_cast<int>(-asked) : 0;
    if (error == EINTR || error == EAGAIN) error = 0;  // asks again
    while (error == 0 && fdatasync(range.file->descriptor) != 0) {
      if (errno != EINTR) error = errno;
    }
    if (error == 0) continue;
    {
      const MutexLock lock(mutex_);
      for (Record& each : records_) {
        if (!each.is_sealed) mark_torn(each, std::string("an earlier write of it failed: ") + std::strerror(error));
      }
    }
    throw MachineError("writing record " + std::to_string(number) + " to " + range.file->name +
                       " failed: " + std::strerror(error) + ". Load these weights again");
  }
}

// Only advice: the kernel gives these pages to others anyway if memory is short.
void FileStore::forget_cached(const Record& record) {
  for (const FilePart& range : record.mapped) {
    if (range.memory != nullptr) madvise(range.memory, static_cast<std::size_t>(range.bytes.count), MADV_DONTNEED);
    posix_fadvise(range.file->descriptor, range.offset.count, range.bytes.count, POSIX_FADV_DONTNEED);
  }
}

FileStore::Record& FileStore::at(int record) { return const_cast<Record&>(std::as_const(*this).at(record)); }

const FileStore::Record& FileStore::at(int record) const {
  NORIA_INVARIANT(record >= 0 && static_cast<std::size_t>(record) < records_.size(), "no such record");
  return records_[static_cast<std::size_t>(record)];
}

Bytes FileStore::file_bytes() const {
  Bytes all;
  for (Bytes end : ends_) all += end;
  return all;
}

void FileStore::expect_memory(std::byte* memory, Bytes bytes) {
  why_not_registered_ = reader_->expect_memory(memory, bytes);
  const std::string writer = writer_->expect_memory(memory, bytes);
  if (why_not_registered_.empty()) why_not_registered_ = writer;
}

std::vector<std::string> FileStore::notes() const {
  std::vector<std::string> notes;
  if (!why_no_uring_.empty()) {
    const std::string number = std::to_string(options_.depth);
    notes.push_back(number + " threads read files, and " + number + " others write them: " + why_no_uring_);
  }
  if (!why_not_registered_.empty()) {
    notes.push_back("each read and write of files pins its memory anew: " + why_not_registered_);
  }
  for (const ScratchFile& file : files_) {
    if (!file.why_not_direct().empty()) {
      notes.push_back(file.to_use().name + " goes through the page cache: " + file.why_not_direct());
    }
  }
  return notes;
}

}  // namespace noria
