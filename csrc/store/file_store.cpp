#include "store/file_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

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
    FilePart& part = record.parts.emplace_back();
    const std::size_t chosen = file % files_.size();
    part.file = &files_[chosen].to_use();
    part.offset = ends_[chosen];
    part.bytes = std::min(options_.part, record.bytes - at);
    ends_[chosen] += part.bytes;
  }
  return number;
}

void FileStore::reserve() {
  for (std::size_t file = 0; file < files_.size(); ++file) files_[file].reserve(ends_[file]);
}

void FileStore::read(int number, std::byte* memory) {
  const Record& record = at(number);
  if (record.is_torn) {
    throw MachineError("record " + std::to_string(number) + " in " + record.parts.front().file->name +
                       " is torn: an earlier write of it failed");
  }
  if (!record.is_written) {
    std::memset(memory, 0, static_cast<std::size_t>(record.bytes.count));
    return;
  }
  std::vector<FilePart> parts = parts_in(record, memory);
  reader_->run(FileWay::read, parts);
  for (std::size_t part = 0; part < parts.size(); ++part) {
    if (parts[part].sum == record.parts[part].sum) continue;
    throw MachineError(to_string(parts[part].bytes) + " at offset " + std::to_string(parts[part].offset.count) +
                       " of " + parts[part].file->name + " are not what was written there: their checksum differs");
  }
}

void FileStore::write(int number, const std::byte* memory) {
  Record& record = at(number);
  record.is_torn = true;
  // A door writes from memory that it does not change.
  std::vector<FilePart> parts = parts_in(record, const_cast<std::byte*>(memory));
  writer_->run(FileWay::write, parts);
  for (std::size_t part = 0; part < parts.size(); ++part) record.parts[part].sum = parts[part].sum;
  record.is_written = true;
  record.is_torn = false;
}

std::vector<FilePart> FileStore::parts_in(const Record& record, std::byte* memory) const {
  std::vector<FilePart> parts = record.parts;
  for (FilePart& part : parts) {
    part.memory = memory;
    memory += part.bytes.count;
  }
  return parts;
}

FileStore::Record& FileStore::at(int record) {
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
