#include "device/scratch_file.h"

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include <fcntl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/errors.h"

namespace noria {
namespace {

std::string why(const std::string& what) { return what + " failed: " + std::strerror(errno); }

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;  // one owner per descriptor
  Descriptor& operator=(const Descriptor&) = delete;
  operator int() const { return number_; }
  int release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

void refuse(const std::string& folder, const std::string& found) {
  throw UsageError("a folder of your own for files=, that not all users can write to", "\"" + folder + "\": " + found,
                   "name a folder that you have made with mkdir -m 700");
}

// The checks look at the descriptor, so no other user can put another folder there in between.
int open_folder(const std::string& folder) {
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) refuse(folder, why("making it"));
  Descriptor opened(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (opened < 0) {
    refuse(folder, errno == ELOOP || errno == ENOTDIR ? "a symbolic link, or no folder" : why("opening it"));
  }
  struct stat found{};
  if (fstat(opened, &found) != 0) throw MachineError(why("fstat of " + folder));
  if (found.st_uid != geteuid()) refuse(folder, "a folder of user " + std::to_string(found.st_uid));
  if ((found.st_mode & S_IWOTH) != 0) refuse(folder, "a folder that all users can write to");
  return opened.release();
}

// Some file systems have no files without a name. There the file has a random one for a moment.
int open_and_unlink(int folder, int flags) {
  std::uint64_t number = 0;
  if (getrandom(&number, sizeof number, 0) != sizeof number) return -1;
  const std::string name = "noria-" + std::to_string(number);
  const int opened = openat(folder, name.c_str(), flags | O_CREAT | O_EXCL | O_NOFOLLOW, 0600);
  if (opened >= 0) unlinkat(folder, name.c_str(), 0);
  return opened;
}

int open_unnamed(int folder, int flags) {
  flags |= O_RDWR | O_CLOEXEC;
  const int opened = openat(folder, ".", flags | O_TMPFILE, 0600);
  if (opened >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return opened;
  return open_and_unlink(folder, flags);
}

// A file system may refuse O_DIRECT when a file is opened, or at the first read.
std::optional<std::string> refusal_of_direct(int file) {
  const std::unique_ptr<void, decltype(&std::free)> memory(
      std::aligned_alloc(static_cast<std::size_t>(kFileAlignment.count),
                         static_cast<std::size_t>(kFileAlignment.count)),
      &std::free);
  if (memory == nullptr) throw MachineError("the machine has no page of memory left");
  if (pread(file, memory.get(), static_cast<std::size_t>(kFileAlignment.count), 0) < 0) return why("a direct read");
  return std::nullopt;
}

}  // namespace

ScratchFile::ScratchFile(const std::string& folder) : folder_(folder) {
  file_.name = "a file in " + folder;
  const Descriptor opened_folder(open_folder(folder));
  Descriptor direct(open_unnamed(opened_folder, O_DIRECT));
  if (direct < 0) {
    if (errno != EINVAL) throw MachineError(why("making a file in " + folder));
    why_not_direct_ = why("opening with O_DIRECT");
  } else if (const auto refusal = refusal_of_direct(direct)) {
    why_not_direct_ = *refusal;
  } else {
    file_.is_direct = true;
    file_.descriptor = direct.release();
    return;
  }
  file_.descriptor = open_unnamed(opened_folder, 0);
  if (file_.descriptor < 0) throw MachineError(why("making a file in " + folder));
}

ScratchFile::~ScratchFile() {
  if (file_.descriptor >= 0) ::close(file_.descriptor);
}

ScratchFile::ScratchFile(ScratchFile&& other) noexcept
    : file_(std::move(other.file_)),
      folder_(std::move(other.folder_)),
      why_not_direct_(std::move(other.why_not_direct_)) {
  other.file_.descriptor = -1;
}

void ScratchFile::reserve(Bytes bytes) {
  if (bytes == Bytes{0}) return;
  int error = 0;
  do {
    error = fallocate(file_.descriptor, 0, 0, bytes.count) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == EOPNOTSUPP) {  // then the C library writes to each block
    error = posix_fallocate(file_.descriptor, 0, bytes.count);
  }
  if (error == 0) return;
  const Bytes left = free_space(folder_);
  [[maybe_unused]] const int truncated = ftruncate(file_.descriptor, 0);  // gives back what was taken
  if (error == ENOSPC || error == EDQUOT) {
    throw UsageError("space of " + to_string(bytes) + " (" + std::to_string(bytes.count) + " bytes) in " + folder_,
                     to_string(left) + (error == EDQUOT ? " within the file system, and a quota" : " free"),
                     "free space there, or name other folders");
  }
  if (error == EFBIG) {
    rlimit limit{};
    getrlimit(RLIMIT_FSIZE, &limit);
    throw UsageError("files of " + to_string(bytes) + " in " + folder_,
                     limit.rlim_cur == RLIM_INFINITY
                         ? "a file system that has no files so large"
                         : "a limit of " + to_string(Bytes{static_cast<std::int64_t>(limit.rlim_cur)}) + " (ulimit -f)",
                     "raise that limit, or name several folders");
  }
  throw MachineError("reserving " + to_string(bytes) + " in " + folder_ + " failed: " + std::strerror(error));
}

Bytes free_space(const std::string& folder) {
  struct statvfs found{};
  if (statvfs(folder.c_str(), &found) != 0) throw MachineError(why("statvfs of " + folder));
  return Bytes{static_cast<std::int64_t>(found.f_bavail * found.f_frsize)};
}

}  // namespace noria
