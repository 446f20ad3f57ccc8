#include "store/file_home.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include "base/errors.h"
#include "device/host_memory.h"

namespace noria {
namespace {

Bytes whole_pages(Bytes bytes) { return align_up(bytes, Bytes{sysconf(_SC_PAGESIZE)}); }

}  // namespace

SharedPages::SharedPages(Bytes bytes) : bytes_(bytes), descriptor_(make_shared_pages(bytes)) {
  if (descriptor_ >= 0) data_ = map_shared_pages(descriptor_, bytes);
  if (data_ != nullptr) {
    madvise(data_, static_cast<std::size_t>(bytes.count), MADV_DONTFORK);
    join_pages(data_, bytes);
    return;
  }
  const int why = errno;
  if (descriptor_ >= 0) close(descriptor_);
  throw MachineError("taking " + to_string(bytes) + " for state that lies in files failed: " + std::strerror(why));
}

SharedPages::~SharedPages() {
  if (getpid() == process_) unmap_pages(data_, bytes_);  // a forked child has not inherited the mapping
  close(descriptor_);
}

FileHome::FileHome(const std::vector<std::string>& folders, const std::vector<Bytes>& sizes, int num_slots,
                   const FileStoreOptions& options)
    : store_(folders, options) {
  Bytes end;
  for (const Bytes size : sizes) {
    const int record = store_.add(size);
    offsets_.push_back(end);
    end += whole_pages(store_.bytes_of(record));
    slot_bytes_ = std::max(slot_bytes_, store_.bytes_of(record));
  }
  store_.reserve();
  addresses_ = std::make_shared<Arena>(Arena::of_addresses(end));
  add_slots(num_slots);
  if (num_slots > 0) store_.expect_memory(at(0).memory(), Bytes{whole_pages(slot_bytes_).count * num_slots});
}

FileHome::~FileHome() {
  if (getpid() != process_) return;  // a forked child has none of these mappings
  try {
    store_.expect_memory(nullptr, Bytes{0});
    drop_slots(0);
  } catch (...) {  // NOLINT(bugprone-empty-catch): no address was given back, and a destructor does not throw
  }
}

void FileHome::add_slots(int count) {
  const Bytes stride = whole_pages(slot_bytes_);
  const auto pages = std::make_shared<SharedPages>(Bytes{stride.count * count});
  const MutexLock lock(mutex_);
  for (int slot = 0; slot < count; ++slot) slots_.push_back({pages, Bytes{stride.count * slot}, std::nullopt});
}

int FileHome::num_slots() const {
  const MutexLock lock(mutex_);
  return static_cast<int>(slots_.size());
}

FileHome::Slot& FileHome::at(int slot) {
  const MutexLock lock(mutex_);
  return slots_.at(static_cast<std::size_t>(slot));
}

void FileHome::drop_slots(int left) {
  for (int last = num_slots() - 1; last >= left; --last) {
    vacate(at(last));
    const MutexLock lock(mutex_);
    slots_.pop_back();
  }
}

void FileHome::bring(int record, int number, bool is_blank) {
  Slot& slot = at(number);
  vacate(slot);
  if (is_blank) std::memset(slot.memory(), 0, static_cast<std::size_t>(bytes_of(record).count));
  else store_.read(record, slot.memory());
  const auto size = static_cast<std::size_t>(whole_pages(bytes_of(record)).count);
  std::byte* const address = addresses_->data() + offset_of(record).count;
  if (mmap(address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, slot.pages->descriptor(), slot.from.count) ==
      MAP_FAILED) {
    throw MachineError("mmap of " + to_string(bytes_of(record)) + " of state failed: " + std::strerror(errno));
  }
  slot.record = record;
  madvise(address, size, MADV_DONTFORK);
}

void FileHome::put_back(int record, int slot) { store_.write(record, at(slot).memory()); }

// The addresses stay taken, without memory: no other mapping may come there.
void FileHome::vacate(Slot& slot) {
  const std::optional<int> record = std::exchange(slot.record, std::nullopt);
  if (!record || addresses_->data() == nullptr) return;
  const void* const there = mmap(addresses_->data() + offset_of(*record).count,
                                 static_cast<std::size_t>(whole_pages(bytes_of(*record)).count), PROT_NONE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (there == MAP_FAILED) throw MachineError(std::string("mmap of addresses failed: ") + std::strerror(errno));
}

}  // namespace noria
