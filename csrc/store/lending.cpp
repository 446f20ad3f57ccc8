#include "store/lending.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <map>
#include <new>
#include <optional>
#include <span>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include "base/errors.h"
#include "base/ranges.h"
#include "store/local_peer.h"

namespace noria {
namespace {

using std::chrono::milliseconds;

std::string rank_name(std::int64_t rank) { return "rank " + std::to_string(rank); }

// ---- words -------------------------------------------------------------------------------------------------------
// Holds the words of one loan in one cache line: Note [Words that only fall].
struct alignas(64) Line {
  std::atomic<std::uint64_t> wanted, used;  // bytes
  std::atomic<std::uint64_t> lender_may_end;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "a lock would be of one process alone");

Bytes read(const std::atomic<std::uint64_t>& word) {
  return {static_cast<std::int64_t>(word.load(std::memory_order_acquire))};
}

void lower(std::atomic<std::uint64_t>& word, Bytes bytes) {
  NORIA_INVARIANT(bytes >= Bytes{0} && bytes <= read(word), "what is left of a loan never grows");
  word.store(static_cast<std::uint64_t>(bytes.count), std::memory_order_release);
}

class Words {
 public:
  Words() = default;
  Words(const Descriptor& memory, std::size_t num_lines) : size_(num_lines * sizeof(Line)) {
    void* const mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, memory.number(), 0);
    if (mapped == MAP_FAILED) refuse_to_share("mmap of " + std::to_string(size_) + " bytes of words");
    lines_ = static_cast<Line*>(mapped);
  }
  ~Words() {
    if (lines_ != nullptr) munmap(lines_, size_);
  }
  Words(Words&& other) noexcept : lines_(std::exchange(other.lines_, nullptr)), size_(other.size_) {}
  Words& operator=(Words&& other) noexcept {
    std::swap(lines_, other.lines_);
    std::swap(size_, other.size_);
    return *this;
  }
  Words(const Words&) = delete;  // one owner per mapping
  Words& operator=(const Words&) = delete;

  Line* line(std::size_t index) const { return lines_ + index; }

 private:
  Line* lines_ = nullptr;
  std::size_t size_ = 0;
};

Descriptor make_words(std::size_t num_lines) {
  Descriptor memory(memfd_create("noria-lending", MFD_CLOEXEC));
  if (!memory) refuse_to_share("memfd_create");
  const std::size_t size = num_lines * sizeof(Line);
  if (ftruncate(memory.number(), static_cast<off_t>(size)) != 0) {
    refuse_to_share("ftruncate to " + std::to_string(size) + " bytes of words");
  }
  return memory;
}

// ---- packets -----------------------------------------------------------------------------------------------------
constexpr std::uint64_t kProtocol = 0x6e6f'7269'614c'0001;  // another build has another number or packet size
constexpr std::string_view kScheme = "noria-lender:";
constexpr std::size_t kNameSize = 32;  // of random_name
using Token = std::array<char, kNameSize>;

struct Address {
  std::string name;
  Token token{};
};

Address parse_address(const std::string& text) {
  const std::size_t begin = kScheme.size();
  NORIA_INVARIANT(text.size() == begin + 2 * kNameSize + 1 && text.starts_with(kScheme), "this is no lender's address");
  Address address{text.substr(begin, kNameSize), {}};
  std::copy_n(text.end() - kNameSize, kNameSize, address.token.begin());
  return address;
}

struct Hello {
  std::uint64_t protocol = kProtocol;
  Token token{};
  std::int64_t borrower = -1;
};

struct Offer {  // sent with the descriptors of the words and, if there is one, of the arena
  std::uint64_t protocol = kProtocol;
  std::int64_t lender = -1;
  std::uint64_t line = 0, num_lines = 0;
  SharedMemory arena;
  Bytes offset, bytes;
};
static_assert(std::is_trivially_copyable_v<Hello> && std::is_trivially_copyable_v<Offer>);

void check_loans(const SharedMemory& arena, const std::vector<Loan>& loans) {
  Ranges taken;
  std::vector<int> borrowers;
  for (const Loan& loan : loans) {
    const std::string who = "the loan to " + rank_name(loan.borrower);
    NORIA_INVARIANT(loan.offset >= Bytes{0} && loan.bytes > Bytes{0} && loan.bytes <= arena.bytes &&
                        loan.offset <= arena.bytes - loan.bytes,
                    who + " is empty or leaves the arena");
    NORIA_INVARIANT(taken.within(loan.offset, loan.offset + loan.bytes).empty(), who + " overlaps another one");
    NORIA_INVARIANT(std::ranges::find(borrowers, loan.borrower) == borrowers.end(), who + " is its second one");
    taken.add(loan.offset, loan.offset + loan.bytes);
    borrowers.push_back(loan.borrower);
  }
}

}  // namespace

// ---- lender ------------------------------------------------------------------------------------------------------
struct Lender::State {
  struct Lent {
    Loan loan;
    Peer peer;
    Line* line;
  };
  int rank;
  Descriptor listener;  // none: has lent
  Token token;
  Words words;
  std::map<int, Lent> lent;  // by borrower

  std::string who(const Loan& loan) const {
    return rank_name(loan.borrower) + ", which is to borrow " + to_string(loan.bytes) + " of " + rank_name(rank);
  }
  const Lent& to(int borrower) const {
    const auto found = lent.find(borrower);
    NORIA_INVARIANT(found != lent.end(), "nothing is lent to " + rank_name(borrower));
    return found->second;
  }
  std::map<int, Peer> meet(const std::vector<Loan>& loans, milliseconds timeout);
  void leave() const {
    for (const auto& [borrower, to] : lent) to.line->lender_may_end.store(1, std::memory_order_release);
  }
};

Lender::Lender(int rank) : process_(getpid()) {
  const std::string name = random_name();
  address_ = std::string(kScheme) + name + ":" + random_name();
  state_ = std::make_unique<State>(State{rank, listen_as(name), parse_address(address_).token, {}, {}});
}

Lender::~Lender() { close(); }

void Lender::close() {
  if (getpid() != process_) {
    (void)state_.release();  // leaked on purpose: in the child these numbers and addresses may be another's by now
    return;
  }
  if (state_ == nullptr) return;
  state_->leave();
  state_.reset();
}

Lender::State& Lender::state() const {
  NORIA_INVARIANT(getpid() == process_, "a lender is used in a forked child");
  NORIA_INVARIANT(state_ != nullptr, "a lender is used after close");
  return *state_;
}

// Each borrower that connects says Hello. A connection that says nothing delays no other; one that says anything else
// is dropped.
std::map<int, Peer> Lender::State::meet(const std::vector<Loan>& loans, milliseconds timeout) {
  const Descriptor door = std::move(listener);  // later connections are refused
  std::map<int, Peer> come;
  std::vector<Peer> silent;
  const auto has_spoken = [&](Peer& peer) {
    Hello hello;
    const auto packet = peer.hear(std::as_writable_bytes(std::span(&hello, 1)));
    if (!packet) return false;
    const bool knows = packet->size == sizeof hello && hello.protocol == kProtocol && hello.token == token;
    const bool is_awaited =
        knows && std::ranges::any_of(loans, [&](const Loan& loan) { return loan.borrower == hello.borrower; });
    if (is_awaited) come.try_emplace(static_cast<int>(hello.borrower), std::move(peer));
    return true;
  };

  const Deadline deadline(timeout);
  for (bool is_last = false; come.size() < loans.size() && !is_last;) {
    is_last = deadline.left_ms() == 0;
    std::vector<pollfd> watched{{door.number(), POLLIN, 0}};
    for (const Peer& peer : silent) watched.push_back(peer.watched().front());
    wait(std::move(watched), deadline);
    while (auto peer = Peer::accept(door)) silent.push_back(std::move(*peer));
    std::erase_if(silent, has_spoken);
  }
  for (const Loan& loan : loans) {
    if (come.contains(loan.borrower)) continue;
    throw MachineError(who(loan) + ", has not come within " + std::to_string(timeout.count()) +
                       " ms: it has ended, is late, or is on another machine");
  }
  return come;
}

void Lender::lend(const SharedMemory& arena, const std::vector<Loan>& loans, milliseconds timeout) {
  State& self = state();
  NORIA_INVARIANT(self.listener, "a lender lends once");
  check_loans(arena, loans);
  std::map<int, Peer> come = self.meet(loans, timeout);
  if (loans.empty()) return;

  const Descriptor memory = make_words(loans.size());
  self.words = Words(memory, loans.size());
  std::vector<int> descriptors{memory.number()};
  if (arena.fd >= 0) descriptors.push_back(arena.fd);
  for (std::size_t index = 0; index < loans.size(); ++index) {
    const Loan& loan = loans[index];
    const auto bytes = static_cast<std::uint64_t>(loan.bytes.count);
    Line* const line = new (self.words.line(index)) Line{bytes, bytes, 0};
    const auto found = self.lent.emplace(loan.borrower, State::Lent{loan, std::move(come.at(loan.borrower)), line});
    const Peer& peer = found.first->second.peer;
    const Offer offer{kProtocol, self.rank, index, loans.size(), arena, loan.offset, loan.bytes};
    if (peer.ended() || !peer.send(std::as_bytes(std::span(&offer, 1)), descriptors)) {
      self.lent.erase(found.first);  // no borrower knows of this loan
      throw MachineError(self.who(loan) + ", is gone");
    }
  }
}

void Lender::ask_back(int borrower, Bytes left) { lower(state().to(borrower).line->wanted, left); }

Bytes Lender::lent(int borrower) const {
  const auto found = state().lent.find(borrower);
  return found == state().lent.end() || found->second.peer.ended() ? Bytes{0} : read(found->second.line->used);
}

void Lender::leave() { state().leave(); }

// ---- borrower ----------------------------------------------------------------------------------------------------
struct Borrower::State {
  int lender;
  Peer peer;
  Words words;
  Line* line = nullptr;  // null: no offer has come yet
  Bytes bytes;
  bool outlives_lender = false;

  std::string who() const {
    return rank_name(lender) + ", which " + (line == nullptr ? "is to lend" : "lends " + to_string(bytes)) +
           " to this rank, ";
  }
  std::optional<Borrowed> take_offer();
};

Borrower::Borrower(int rank, int lender, const std::string& address, milliseconds timeout) : process_(getpid()) {
  const Address to = parse_address(address);
  auto peer = Peer::connect(to.name, timeout);
  const Hello hello{kProtocol, to.token, rank};
  const bool has_closed = peer && !peer->send(std::as_bytes(std::span(&hello, 1)));
  if (!peer || has_closed) {
    throw MachineError(rank_name(lender) + ", which is to lend to this rank, cannot be reached (" +
                       std::generic_category().message(errno) + "): it has ended, or is on another machine");
  }
  state_ = std::make_unique<State>(State{lender, std::move(*peer), {}, nullptr, {}, false});
}

Borrower::~Borrower() { close(); }

void Borrower::close() {
  if (getpid() != process_) {
    (void)state_.release();  // as in Lender::close
    return;
  }
  if (state_ == nullptr) return;
  try {  // an offer that was sent, but never received, is a loan too
    const auto unread = state_->line == nullptr ? state_->take_offer() : std::nullopt;
    if (unread) const Descriptor arena(unread->arena.fd);
  } catch (const std::exception&) {  // no offer
  }
  if (state_->line != nullptr) state_->line->used.store(0, std::memory_order_release);
  state_.reset();
}

Borrower::State& Borrower::state() const {
  NORIA_INVARIANT(getpid() == process_, "a borrower is used in a forked child");
  NORIA_INVARIANT(state_ != nullptr, "a borrower is used after close");
  return *state_;
}

Borrower::State& Borrower::received() const {
  NORIA_INVARIANT(state().line != nullptr, "a borrower has received nothing");
  return *state_;
}

// Returns none if no offer has come yet.
std::optional<Borrowed> Borrower::State::take_offer() {
  Offer offer;
  auto packet = peer.hear(std::as_writable_bytes(std::span(&offer, 1)));
  if (!packet) return std::nullopt;
  if (packet->size == 0) throw MachineError(who() + "has ended, or closed without lending");
  const bool is_understood = packet->size == sizeof offer && offer.protocol == kProtocol &&
                             packet->descriptors.size() == (offer.arena.fd >= 0 ? 2 : 1);
  if (!is_understood)
    throw MachineError(who() + "is of another build of noria, or this process has no descriptors left");
  NORIA_INVARIANT(offer.lender == lender, who() + "is " + rank_name(offer.lender));
  words = Words(packet->descriptors.front(), offer.num_lines);
  line = words.line(offer.line);
  bytes = offer.bytes;
  outlives_lender = offer.arena.fd >= 0;
  offer.arena.fd = offer.arena.fd >= 0 ? packet->descriptors.back().release() : -1;
  return Borrowed{offer.arena, offer.offset, offer.bytes};
}

Borrowed Borrower::receive(milliseconds timeout) {
  State& self = state();
  NORIA_INVARIANT(self.line == nullptr, "a borrower receives once");
  const Deadline deadline(timeout);
  while (true) {
    const bool is_last = deadline.left_ms() == 0;
    const bool has_ended = self.peer.ended();  // asked first: its last packet may still be there
    if (const auto borrowed = self.take_offer()) return *borrowed;
    if (has_ended) throw MachineError(self.who() + "is gone");
    if (is_last) throw MachineError(self.who() + "has not lent within " + std::to_string(timeout.count()) + " ms");
    wait(self.peer.watched(), deadline);
  }
}

Bytes Borrower::allowed() const { return read(received().line->wanted); }

void Borrower::give_back(Bytes left) { lower(received().line->used, left); }

void Borrower::check() const {
  const State& self = state();
  if (!self.peer.ended()) return;
  if (self.outlives_lender && self.line->lender_may_end.load(std::memory_order_acquire) != 0) return;
  throw MachineError(self.who() + "is gone");
}

}  // namespace noria
