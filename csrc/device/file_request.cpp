#include "device/file_request.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/checksum.h"
#include "base/errors.h"

namespace noria {
namespace {

constexpr int kMostInVain = 100;  // with the pauses between them, about a second

}  // namespace

FileRequest::FileRequest(FileWay way, FilePart& part, FileFaults& faults) : way_(way), part_(part), faults_(faults) {
  NORIA_INVARIANT(part.bytes > Bytes{0}, "a part of a file has bytes");
  if (part.file->is_direct) {
    const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(part.memory));
    const std::int64_t all = address | part.offset.count | part.bytes.count;
    NORIA_INVARIANT(all % kFileAlignment.count == 0, "direct reads and writes are aligned");
  }
}

std::int64_t FileRequest::begin() {
  if (way_ == FileWay::write && done_ == Bytes{0} && num_in_vain_ == 0) part_.sum = checksum(part_.memory, part_.bytes);
  if (num_in_vain_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(std::min(num_in_vain_, 10)));
  const std::int64_t asks = faults_.asks_for(way_, part_, part_.bytes - done_);
  if (asks < 0) return asks;
  asked_ = Bytes{asks};
  return 0;
}

bool FileRequest::end(std::int64_t answer) {
  const bool may_help = answer == -EINTR || answer == -EAGAIN;
  if (answer < 0 && !may_help) fail(std::strerror(static_cast<int>(-answer)));
  if (answer == 0 && way_ == FileWay::read) fail("the file ends before them, so it has been truncated");
  const Bytes before = done_;
  if (answer > 0) done_ += Bytes{answer};
  if (done_ == part_.bytes) {
    if (way_ == FileWay::read) part_.sum = checksum(part_.memory, part_.bytes);
    return true;
  }
  if (part_.file->is_direct) done_.count &= -kFileAlignment.count;  // where the next request may begin
  num_in_vain_ = done_ > before ? 0 : num_in_vain_ + 1;
  if (num_in_vain_ > kMostInVain) {
    fail(answer < 0 ? std::strerror(static_cast<int>(-answer)) : "the system does only a part of them each time");
  }
  return false;
}

void FileRequest::fail(const std::string& why) const {
  throw MachineError((way_ == FileWay::read ? "reading " : "writing ") + to_string(part_.bytes - done_) +
                     " at offset " + std::to_string(offset().count) + " of " + part_.file->name + " failed: " + why);
}

}  // namespace noria
