#include "device/host_backend.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include <sys/stat.h>
#include <unistd.h>

#include "base/errors.h"
#include "device/host_memory.h"
#include "device/host_ticket.h"
#include "device/timing.h"

namespace noria {

namespace {

HostTicket& as_host_ticket(const Ticket& ticket) {
  auto* host = dynamic_cast<HostTicket*>(ticket.get());
  NORIA_INVARIANT(host != nullptr, "the host backend gives only tickets that it opened");
  return *host;
}

}  // namespace

struct HostBackend::ComputeStream {
  Mutex mutex;
  std::exception_ptr broken NORIA_GUARDED_BY(mutex);
  HostLane thread{"compute"};

  void rethrow() {
    const MutexLock lock(mutex);
    if (broken) std::rethrow_exception(broken);
  }
  std::exception_ptr error() {
    const MutexLock lock(mutex);
    return broken;
  }
  void run(const std::function<void()>& work) {
    if (error()) return;
    try {
      work();
    } catch (...) {
      const MutexLock lock(mutex);
      broken = std::current_exception();
    }
  }
};

HostBackend::HostBackend(const HostBackendOptions& options)
    : options_(options),
      fetch_(Lane::fetch, options.pace, ledger_),
      drain_(Lane::drain, options.pace, ledger_),
      peer_(Lane::peer, options.pace, ledger_) {}

HostBackend::~HostBackend() { close(); }

// ---- memory ----

std::byte* HostBackend::allocate(Bytes bytes) { return take(bytes, false); }

std::byte* HostBackend::allocate_shared(Bytes bytes) { return take(bytes, true); }

std::byte* HostBackend::take(Bytes bytes, bool for_others) {
  NORIA_INVARIANT(bytes.count > 0, "an allocation of nothing");
  const MutexLock lock(mutex_);
  const std::string policy =
      " under a capacity of " + to_string(options_.capacity) + " (" + to_string(allocated_) + " are taken)";
  if (allocated_ + bytes > options_.capacity) {
    throw MachineError("allocating " + to_string(bytes) + " of device memory on the host failed" + policy);
  }
  const int fd = for_others ? make_shared_pages(bytes) : -1;
  if (for_others && fd < 0) {
    throw MachineError("memfd_create of " + to_string(bytes) + " failed: " + std::generic_category().message(errno) +
                       policy);
  }
  std::byte* memory = for_others ? map_shared_pages(fd, bytes) : map_pages(bytes);
  if (memory == nullptr) {
    const int why = errno;
    if (for_others) ::close(fd);
    throw MachineError("mmap of " + to_string(bytes) + " failed: " + std::generic_category().message(why) + policy);
  }
  if (poisons()) std::memset(memory, 0xFF, static_cast<std::size_t>(bytes.count));
  allocations_.emplace(memory, Allocation{bytes, fd, {}});
  allocated_ += bytes;
  ++num_allocations_;
  return memory;
}

void HostBackend::free(std::byte* memory) {
  if (fetch_.is_forked()) return;  // the child may have inherited the mutex locked
  const MutexLock lock(mutex_);
  const auto found = allocations_.find(memory);
  NORIA_INVARIANT(found != allocations_.end(), "freed what the host backend did not allocate");
  const Allocation freed = found->second;
  unmap_pages(memory, freed.bytes);
  if (freed.fd >= 0) ::close(freed.fd);
  allocated_ -= freed.bytes - freed.discarded;
  allocations_.erase(found);
}

SharedMemory HostBackend::shared(std::byte* memory) const {
  const MutexLock lock(mutex_);
  const auto found = allocations_.find(memory);
  NORIA_INVARIANT(found != allocations_.end() && found->second.fd >= 0, "told of memory that is not shared");
  return {found->second.bytes, found->second.fd, {}};
}

Bytes HostBackend::discard_shared(std::byte* memory, Bytes offset, Bytes bytes) {
  const MutexLock lock(mutex_);
  const auto found = allocations_.find(memory);
  NORIA_INVARIANT(found != allocations_.end() && found->second.fd >= 0, "discarded memory that is not shared");
  const Bytes discarded = discard_pages(found->second.fd, offset, bytes);
  found->second.discarded += discarded;
  allocated_ -= discarded;
  return discarded;
}

std::byte* HostBackend::open_shared(const SharedMemory& told) {
  const std::string what =
      "opening shared memory of " + to_string(told.bytes) + " by descriptor " + std::to_string(told.fd) + " failed: ";
  struct stat file{};
  if (fstat(told.fd, &file) != 0) throw MachineError(what + "fstat: " + std::generic_category().message(errno));
  const Bytes held{file.st_size};
  if (told.bytes.count <= 0 || held < told.bytes) {
    throw MachineError(what + "it holds " + std::to_string(held.count) + " bytes of " +
                       std::to_string(told.bytes.count));
  }
  std::byte* memory = map_shared_pages(told.fd, told.bytes);
  if (memory == nullptr) throw MachineError(what + "mmap: " + std::generic_category().message(errno));
  const MutexLock lock(mutex_);
  opened_.add(memory, told.bytes);
  return memory;
}

void HostBackend::close_shared(std::byte* memory) {
  if (fetch_.is_forked()) return;
  const MutexLock lock(mutex_);
  if (!closed_) unmap_pages(memory, opened_.remove(memory));
}

Bytes HostBackend::allocated() const {
  const MutexLock lock(mutex_);
  return allocated_;
}

std::int64_t HostBackend::num_allocations() const {
  const MutexLock lock(mutex_);
  return num_allocations_;
}

// ---- transfers ----

TimedLane& HostBackend::transfer_lane(Lane lane) {
  NORIA_INVARIANT(lane == Lane::fetch || lane == Lane::drain || lane == Lane::peer,
                  "no transfer runs on the " + std::string(to_string(lane)) + " lane");
  return lane == Lane::fetch ? fetch_ : lane == Lane::drain ? drain_ : peer_;
}

Ticket HostBackend::submit(const OpLabel& label, Transfer transfer, std::vector<Ticket> waits) {
  TimedLane& lane = transfer_lane(label.lane);
  if (label.lane == Lane::peer && !lane.is_forked()) {
    const MutexLock lock(mutex_);
    opened_.check(transfer);
  }
  const Bytes bytes = transfer.bytes();
  const std::int64_t least_ns = options_.pace->least_ns(label.lane, transfer);
  return lane.submit({label, std::move(waits), bytes, least_ns, [transfer = std::move(transfer)] {
                        for (const CopySpan& copy : transfer.copies) {
                          std::memcpy(copy.to, copy.from, static_cast<std::size_t>(copy.bytes.count));
                        }
                        for (const auto& [memory, filled] : transfer.poison) {
                          std::memset(memory, 0xFF, static_cast<std::size_t>(filled.count));
                        }
                      }});
}

// ---- ops that callers give ----

Ticket HostBackend::open(const OpLabel& label, Bytes bytes) {
  auto ticket = std::make_shared<HostTicket>(label);
  const MutexLock lock(mutex_);
  open_[label.op] = {label, now_ns(), false, bytes, {}};
  return ticket;
}

void HostBackend::give(const Ticket& ticket, Stream stream) {
  HostTicket& host = as_host_ticket(ticket);
  if (stream.is_calling_thread()) {
    given(ticket->label);
    host.pass();
    return;
  }
  ComputeStream& compute = compute_stream(stream);
  compute.thread.enqueue({[this, &compute, &host, ticket] {
                            given(ticket->label);
                            if (auto error = compute.error()) {
                              host.fail(std::move(error));
                            } else {
                              host.pass();
                            }
                          },
                          [&host, ticket](std::exception_ptr error) { host.fail(std::move(error)); }});
}

void HostBackend::give_failed(const Ticket& ticket, std::exception_ptr error) {
  {
    const MutexLock lock(mutex_);
    open_.erase(ticket->label.op);
  }
  as_host_ticket(ticket).fail(std::move(error));
}

void HostBackend::wait(const std::vector<Ticket>& tickets, Stream stream, const OpLabel& waiter) {
  if (stream.is_calling_thread()) {
    std::int64_t since_ns = now_ns();
    const auto held_up = paused(waiter, since_ns, !tickets.empty());
    for (const Ticket& ticket : tickets) {
      ticket->wait_passed();
      since_ns = stood_until(ledger_, ticket, waiter, since_ns);
    }
    sleep_for_us(options_.pace->before_us(Lane::compute, waiter.verb));
    if (held_up) resumed(*held_up, tickets);
    return;
  }
  ComputeStream& compute = compute_stream(stream);
  compute.rethrow();
  for (const Ticket& ticket : tickets) {
    if (ticket->passed()) ticket->wait_passed();  // throws a failure that is already there
  }
  enqueue(stream, [this, &compute, tickets, waiter] {
    std::int64_t idle_since_ns = now_ns();
    const auto held_up = paused(waiter, idle_since_ns, !tickets.empty());
    for (const Ticket& ticket : tickets) {
      compute.thread.await_issued(ticket);
      idle_since_ns = stood_until(ledger_, ticket, waiter, idle_since_ns);
    }
    sleep_for_us(options_.pace->before_us(Lane::compute, waiter.verb));
    if (held_up) resumed(*held_up, tickets);
  });
}

// If a wait of the compute lane belongs to no op, it pauses the op that is open there.
std::optional<OpId> HostBackend::paused(const OpLabel& waiter, std::int64_t at_ns, bool has_waits) {
  const MutexLock lock(mutex_);
  auto found = open_.find(waiter.op);
  if (!waiter.op.valid() && waiter.lane == Lane::compute) {
    found = std::ranges::find_if(
        open_, [](const auto& each) { return each.second.has_begun && each.second.label.lane == Lane::compute; });
  }
  if (found == open_.end()) return std::nullopt;
  OpenOp& op = found->second;
  if (op.has_begun && !has_waits) return std::nullopt;  // it continues
  if (op.has_begun) ledger_.worked_in_part(op.label, op.since_ns, at_ns);
  return found->first;
}

void HostBackend::resumed(OpId op, const std::vector<Ticket>& waits) {
  const MutexLock lock(mutex_);
  const auto found = open_.find(op);
  if (found == open_.end()) return;
  found->second.since_ns = now_ns();
  found->second.has_begun = true;
  for (OpId wait : ids_of(waits)) found->second.waits.push_back(wait);
}

void HostBackend::given(const OpLabel& label) {
  const std::int64_t end_ns = now_ns();
  OpenOp op{label, end_ns, false, {}, {}};
  {
    const MutexLock lock(mutex_);
    const auto found = open_.find(label.op);
    if (found != open_.end()) {
      op = std::move(found->second);
      open_.erase(found);
    }
  }
  ledger_.transferred(label, op.since_ns, end_ns, op.bytes, std::move(op.waits));
}

Stream HostBackend::create_stream() {
  auto stream = std::make_unique<ComputeStream>();
  const Stream handle = Stream::of(stream.get());
  const MutexLock lock(mutex_);
  streams_.emplace(handle, std::move(stream));
  return handle;
}

void HostBackend::enqueue(Stream stream, std::function<void()> work) {
  ComputeStream& compute = compute_stream(stream);
  compute.thread.enqueue({[&compute, work = std::move(work)] { compute.run(work); },
                          [&compute](std::exception_ptr error) {
                            const MutexLock lock(compute.mutex);
                            if (!compute.broken) compute.broken = std::move(error);
                          }});
}

HostBackend::ComputeStream& HostBackend::compute_stream(Stream stream) {
  const MutexLock lock(mutex_);
  const auto found = streams_.find(stream);
  NORIA_INVARIANT(found != streams_.end(), "not a stream of this host backend");
  return *found->second;
}

// ---- the end ----

void HostBackend::idle() {
  for (TimedLane* lane : {&fetch_, &drain_, &peer_}) lane->idle();
}

void HostBackend::close() {
  // A forked child may have inherited the mutex locked. So in a child only the pid is read.
  if (fetch_.is_forked()) return;
  for (TimedLane* lane : {&fetch_, &drain_, &peer_}) lane->close();
  std::vector<ComputeStream*> streams;
  {
    const MutexLock lock(mutex_);
    for (const auto& [memory, bytes] : opened_) unmap_pages(memory, bytes);
    opened_.clear();
    closed_ = true;
    for (auto& [handle, stream] : streams_) streams.push_back(stream.get());
  }
  for (ComputeStream* stream : streams) stream->thread.close();
}

std::shared_ptr<Backend> make_host_backend(const HostBackendOptions& options) {
  return std::make_shared<HostBackend>(options);
}

}  // namespace noria
