#include "store/arena.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
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
std::byte* map_aligned(Bytes bytes, Bytes mapped) {
  const Bytes reserved = mapped + kHugePage;
  void* taken = mmap(nullptr, static_cast<std::size_t>(reserved.count), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
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

Arena::Arena(Bytes bytes) {
  NORIA_INVARIANT(bytes >= Bytes{0}, "an arena has no size");
  if (bytes == Bytes{0}) return;
  const Bytes mapped = round_to_page(bytes);
  std::byte* const data = map_aligned(bytes, mapped);
  const auto size = static_cast<std::size_t>(mapped.count);
  // Only advice: a kernel without huge pages refuses it, and small pages serve as well.
  madvise(data, size, MADV_HUGEPAGE);
  data_ = data;
  process_ = getpid();
  bytes_ = bytes;
  mapped_by_all += mapped.count;
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
      backend_(std::exchange(other.backend_, nullptr)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  Arena taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(process_, taken.process_);
  std::swap(bytes_, taken.bytes_);
  std::swap(has_memory_, taken.has_memory_);
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
  if (data_ != nullptr) noria::populate(data_, bytes_, told, options);
}

std::string Arena::register_with(std::shared_ptr<Backend> backend, HomeUse use) {
  NORIA_INVARIANT(!registered(), "an arena is registered twice");
  if (data_ == nullptr) return {};
  if (backend->pins() && madvise(data_, static_cast<std::size_t>(mapped_bytes().count), MADV_DONTFORK) != 0) {
    refuse("madvise(MADV_DONTFORK)", bytes_, mapped_bytes());
  }
  backend_ = std::move(backend);
  try {
    return backend_->register_home(data_, bytes_, use);
  } catch (...) {
    allow_fork();
    backend_ = nullptr;
    throw;
  }
}

void Arena::allow_fork() {
  if (registered()) madvise(data_, static_cast<std::size_t>(mapped_bytes().count), MADV_DOFORK);
}

void Arena::close() {
  struct Unmap {  // runs even if unregistering throws
    std::byte* data;
    Bytes bytes;
    bool has_memory;
    ~Unmap() {
      if (data == nullptr) return;
      munmap(data, static_cast<std::size_t>(bytes.count));
      if (has_memory) mapped_by_all -= bytes.count;
    }
  };
  const Unmap unmap{getpid() == process_ ? data_ : nullptr, mapped_bytes(), has_memory_};
  std::byte* const data = std::exchange(data_, nullptr);
  bytes_ = Bytes{0};
  const auto backend = std::exchange(backend_, nullptr);
  if (backend != nullptr && unmap.data != nullptr) backend->unregister_home(data);
}

Bytes Arena::mapped_bytes() const { return round_to_page(bytes_); }

Bytes Arena::all_mapped() { return {mapped_by_all}; }

}  // namespace noria
