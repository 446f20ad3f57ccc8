#include "store/arena.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <list>
#include <string>
#include <system_error>
#include <utility>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/errors.h"

namespace noria {
namespace {

constexpr Bytes kHugePage{2 * 1024 * 1024};
std::atomic<std::int64_t> mapped_by_all = 0;

Bytes round_to_page(Bytes bytes) { return align_up(bytes, Bytes{sysconf(_SC_PAGESIZE)}); }

[[noreturn]] void refuse(const char* call, Bytes bytes, Bytes mapped) {
  throw MachineError(std::string(call) + " failed for an arena of " + to_string(bytes) + " (" +
                     std::to_string(mapped.count) +
                     " bytes with whole pages): " + std::generic_category().message(errno) +
                     "; free host memory, or raise the limit of the process (ulimit -v, the container's memory)");
}

// mmap aligns only to the small page. So this takes one more huge page, then gives back what lies before and behind.
std::byte* map_aligned(Bytes bytes, Bytes mapped, int protection, int flags) {
  const Bytes reserved = mapped + kHugePage;
  void* taken =
      mmap(nullptr, static_cast<std::size_t>(reserved.count), protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  if (taken == MAP_FAILED) refuse("mmap", bytes, mapped);
  auto* const begin = static_cast<std::byte*>(taken);
  const Bytes address{static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(begin))};
  const Bytes before = align_up(address, kHugePage) - address;
  const Bytes behind = kHugePage - before;
  std::byte* const data = begin + before.count;
  if (before > Bytes{0}) munmap(begin, static_cast<std::size_t>(before.count));
  if (behind > Bytes{0}) munmap(data + mapped.count, static_cast<std::size_t>(behind.count));
  return data;
}

}  // namespace

Arena::Arena(Bytes bytes) : Arena(bytes, {}) {}

Arena::Arena(Bytes bytes, std::vector<ByteRange> elsewhere) {
  NORIA_INVARIANT(bytes >= Bytes{0}, "an arena has no size");
  if (bytes == Bytes{0}) return;
  const Bytes mapped = round_to_page(bytes);
  // Addresses without memory must not count as memory that the process asks for: there may be more than the machine
  // has.
  const bool has_gaps = !elsewhere.empty();
  std::byte* const data =
      map_aligned(bytes, mapped, has_gaps ? PROT_NONE : PROT_READ | PROT_WRITE, has_gaps ? MAP_NORESERVE : 0);
  const auto size = static_cast<std::size_t>(mapped.count);
  // Only advice: a kernel without huge pages refuses it, and small pages serve as well.
  madvise(data, size, MADV_HUGEPAGE);
  data_ = data;
  process_ = getpid();
  bytes_ = bytes;
  elsewhere_ = std::move(elsewhere);
  mapped_by_all += mapped.count;
  if (!has_gaps) return;
  for (const ByteRange& range : elsewhere_) mapped_by_all -= range.bytes().count;
  for (const ByteRange& range : in_memory()) {
    if (mmap(data + range.begin.count, static_cast<std::size_t>(range.bytes().count), PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) {
      madvise(data + range.begin.count, static_cast<std::size_t>(range.bytes().count), MADV_HUGEPAGE);
      continue;
    }
    const int why = errno;
    close();
    errno = why;
    refuse("mmap", bytes, mapped);
  }
}

Arena Arena::of_addresses(Bytes bytes) {
  Arena made;
  if (bytes == Bytes{0}) return made;
  const Bytes mapped = round_to_page(bytes);
  void* const taken = mmap(nullptr, static_cast<std::size_t>(mapped.count), PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (taken == MAP_FAILED) refuse("mmap", bytes, mapped);
  made.data_ = static_cast<std::byte*>(taken);
  made.process_ = getpid();
  made.bytes_ = bytes;
  made.has_memory_ = false;
  return made;
}

Arena::~Arena() {
  try {
    close();
  } catch (...) {  // NOLINT(bugprone-empty-catch): the mapping is gone, and a destructor does not throw
  }
}

Arena::Arena(Arena&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      process_(other.process_),
      bytes_(std::exchange(other.bytes_, Bytes{0})),
      has_memory_(other.has_memory_),
      elsewhere_(std::exchange(other.elsewhere_, {})),
      registered_(std::exchange(other.registered_, {})),
      backend_(std::exchange(other.backend_, nullptr)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  Arena taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(process_, taken.process_);
  std::swap(bytes_, taken.bytes_);
  std::swap(has_memory_, taken.has_memory_);
  std::swap(elsewhere_, taken.elsewhere_);
  std::swap(registered_, taken.registered_);
  std::swap(backend_, taken.backend_);
  return *this;
}

// Makes the system call itself: libnuma would be one more thing to install, for this one line.
std::string Arena::prefer_node(int node) {
  constexpr unsigned kBits = 64;
  constexpr long kPreferred = 1;  // MPOL_PREFERRED
  std::array<std::uint64_t, 16> nodes{};
  NORIA_INVARIANT(node >= 0 && node < static_cast<int>(nodes.size() * kBits), "no such NUMA node");
  if (data_ == nullptr) return {};
  nodes.at(static_cast<unsigned>(node) / kBits) = std::uint64_t{1} << (static_cast<unsigned>(node) % kBits);
  const long failed = syscall(SYS_mbind, data_, static_cast<unsigned long>(mapped_bytes().count), kPreferred,
                              nodes.data(), nodes.size() * kBits + 1, 0UL);
  if (failed == 0) return {};
  return "mbind to node " + std::to_string(node) + " failed: " + std::generic_category().message(errno);
}

void Arena::populate(const OnPopulated& told, PopulateOptions options) {
  if (data_ == nullptr) return;
  Bytes done;
  for (const ByteRange& range : in_memory()) {
    const Bytes before = done;
    const auto tell = [&](Bytes populated) { told(before + populated); };
    noria::populate(data_ + range.begin.count, range.bytes(), told ? OnPopulated(tell) : told, options);
    done += range.bytes();
  }
}

std::string Arena::register_with(std::shared_ptr<Backend> backend, HomeUse use) {
  NORIA_INVARIANT(!registered(), "an arena is registered twice");
  if (data_ == nullptr) return {};
  if (backend->pins() && madvise(data_, static_cast<std::size_t>(mapped_bytes().count), MADV_DONTFORK) != 0) {
    refuse("madvise(MADV_DONTFORK)", bytes_, mapped_bytes());
  }
  backend_ = std::move(backend);
  std::string refused;
  try {
    for (const ByteRange& range : in_memory()) {
      std::byte* const begin = data_ + range.begin.count;
      const std::string why = backend_->register_home(begin, range.bytes(), use);
      registered_.push_back(begin);
      if (refused.empty()) refused = why;
    }
    return refused;
  } catch (...) {
    allow_fork();
    unregister();
    throw;
  }
}

// Ends all registrations, even if one of them throws.
void Arena::unregister() {
  const auto backend = std::exchange(backend_, nullptr);
  std::exception_ptr failure;
  for (std::byte* const begin : std::exchange(registered_, {})) {
    try {
      backend->unregister_home(begin);
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void Arena::take_in(const std::function<void(int, std::byte*)>& fill) {
  struct Pages {
    std::byte* data = nullptr;
    std::size_t size = 0;
    explicit Pages(std::size_t bytes) : size(bytes) {
      void* const taken = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (taken != MAP_FAILED) data = static_cast<std::byte*>(taken);
    }
    ~Pages() {
      if (data != nullptr) munmap(data, size);
    }
    Pages(const Pages&) = delete;  // owns a mapping
    Pages& operator=(const Pages&) = delete;
  };
  std::list<Pages> all;
  for (const ByteRange& range : elsewhere_) {
    const Pages& pages = all.emplace_back(static_cast<std::size_t>(range.bytes().count));
    if (pages.data == nullptr) refuse("mmap", range.bytes(), range.bytes());
    madvise(pages.data, pages.size, MADV_HUGEPAGE);
    noria::populate(pages.data, range.bytes());
    fill(static_cast<int>(all.size()) - 1, pages.data);
  }
  while (!elsewhere_.empty()) {  // from the end, so that those that are left keep their numbers
    const ByteRange range = elsewhere_.back();
    Pages& pages = all.back();
    if (mremap(pages.data, pages.size, pages.size, MREMAP_MAYMOVE | MREMAP_FIXED, data_ + range.begin.count) ==
        MAP_FAILED) {
      refuse("mremap", range.bytes(), range.bytes());
    }
    pages.data = nullptr;
    all.pop_back();
    elsewhere_.pop_back();
    mapped_by_all += range.bytes().count;
  }
}

void Arena::allow_fork() {
  if (registered()) madvise(data_, static_cast<std::size_t>(mapped_bytes().count), MADV_DOFORK);
}

void Arena::close() {
  struct Unmap {  // runs even if unregistering throws
    std::byte* data;
    Bytes bytes, in_memory;
    ~Unmap() {
      if (data == nullptr) return;
      munmap(data, static_cast<std::size_t>(bytes.count));
      mapped_by_all -= in_memory.count;
    }
  };
  Bytes in_memory = has_memory_ ? mapped_bytes() : Bytes{0};
  for (const ByteRange& range : std::exchange(elsewhere_, {})) in_memory -= range.bytes();
  const Unmap unmap{getpid() == process_ ? data_ : nullptr, mapped_bytes(), in_memory};
  data_ = nullptr;
  bytes_ = Bytes{0};
  if (unmap.data == nullptr) registered_.clear();
  unregister();
}

std::vector<ByteRange> Arena::in_memory() const {
  std::vector<ByteRange> ranges;
  Bytes begin;
  for (const ByteRange& range : elsewhere_) {
    if (range.begin > begin) ranges.push_back({begin, range.begin});
    begin = range.end;
  }
  if (bytes_ > begin) ranges.push_back({begin, bytes_});
  return ranges;
}

Bytes Arena::mapped_bytes() const { return round_to_page(bytes_); }

Bytes Arena::memory_bytes() const {
  Bytes bytes = bytes_;
  for (const ByteRange& range : elsewhere_) bytes -= range.bytes();
  return bytes;
}

Bytes Arena::all_mapped() { return {mapped_by_all}; }

}  // namespace noria
