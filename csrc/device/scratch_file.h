// ScratchFile is a file without a name, in a folder of the user's. When it is closed, or the process ends in any way,
// the system gives its space back.
//
// Units: bytes.
// Ownership: owns the descriptor, which forked children inherit and programs that are executed do not.
// Threads: the caller serialises; a door (device/file_door.h) may use the descriptor on any.
//
// Note [Whose folder]. No other user must be able to put a file or a link in the way. So the folder must be this user's
// own, no symbolic link, and not writable for all. A folder that is not there yet is made, for this user alone.
#pragma once

#include <string>

#include "base/bytes.h"
#include "device/file_door.h"

namespace noria {

class ScratchFile {
 public:
  /// Throws UsageError if the folder does not fit the Note, MachineError if the machine refuses.
  explicit ScratchFile(const std::string& folder);
  ~ScratchFile();
  ScratchFile(ScratchFile&& other) noexcept;
  ScratchFile& operator=(ScratchFile&&) = delete;
  ScratchFile(const ScratchFile&) = delete;  // one owner per descriptor

  /// Takes space for `bytes` from the file system, so that no later write can lack it. Throws UsageError with the
  /// numbers if there is too little; then nothing is taken.
  void reserve(Bytes bytes);

  const FileToUse& to_use() const { return file_; }
  /// Returns why the page cache is in use; empty if it is not.
  const std::string& why_not_direct() const { return why_not_direct_; }

 private:
  FileToUse file_;
  std::string folder_;
  std::string why_not_direct_;
};

/// Returns how many bytes the file system of this folder could still give this user.
Bytes free_space(const std::string& folder);

}  // namespace noria
