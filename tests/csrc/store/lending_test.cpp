// Lending between processes: who gets what, what the words tell, and how an end is known. With real processes, which
// tell each other where they are by packets, so that nothing here waits for a time to pass.
#include "store/lending.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/errors.h"
#include "store/local_peer.h"

namespace noria {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLong{60'000};  // longer than any test: an error that says so has waited for what never came
constexpr milliseconds kShort{20};
constexpr Bytes kArena{1 << 20};

/// One end of a conversation between two processes of a test.
class Line {
 public:
  explicit Line(int end) : end_(end) {}
  void say(const std::string& text) const { send(end_, text.data(), text.size(), MSG_NOSIGNAL); }
  void say(Bytes bytes) const { say(std::to_string(bytes.count)); }
  /// Empty: the other is gone.
  std::string hear() const {
    std::array<char, 512> text{};
    const ssize_t size = recv(end_, text.data(), text.size(), 0);
    return {text.data(), static_cast<std::size_t>(std::max<ssize_t>(size, 0))};
  }

 private:
  int end_;
};

/// A process that is killed with its owner at the latest.
class Process {
 public:
  explicit Process(const std::function<bool(const Line&)>& body) {
    std::array<int, 2> ends{};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()), 0);
    pid_ = fork();
    if (pid_ == 0) {
      ::close(ends[0]);
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      _exit(succeeds(body, Line(ends[1])) ? 0 : 1);
    }
    ::close(ends[1]);
    end_ = Descriptor(ends[0]);
  }
  ~Process() { kill(); }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  Line line() const { return Line(end_.number()); }
  pid_t pid() const { return pid_; }
  void kill() {
    if (pid_ > 0) ::kill(pid_, SIGKILL);
    succeeded();
  }
  bool succeeded() {  // waits for the end
    int status = -1;
    if (pid_ > 0) waitpid(std::exchange(pid_, 0), &status, 0);
    return status == 0;
  }

 private:
  static bool succeeds(const std::function<bool(const Line&)>& body, const Line& line) {
    try {
      return body(line);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "a process of the test: %s\n", error.what());
      return false;
    }
  }
  pid_t pid_ = 0;
  Descriptor end_;
};

/// What a call throws; nothing: it does not.
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const MachineError& error) {
    return error.what();
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

class SharedArena {
 public:
  explicit SharedArena(Bytes bytes) : memory_(memfd_create("test-arena", MFD_CLOEXEC)) {
    EXPECT_EQ(ftruncate(memory_.number(), bytes.count), 0);
    told.bytes = bytes;
    told.fd = memory_.number();
    for (std::size_t i = 0; i < told.handle.size(); ++i) told.handle[i] = std::byte(i + 1);
  }
  SharedMemory told;

 private:
  Descriptor memory_;
};

std::byte* map(const SharedMemory& arena) {
  void* const mapped =
      mmap(nullptr, static_cast<std::size_t>(arena.bytes.count), PROT_READ | PROT_WRITE, MAP_SHARED, arena.fd, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<std::byte*>(mapped);
}

// Fills the range that was lent, as a borrower's backend would.
bool fill(const Borrowed& borrowed, int value) {
  const Descriptor owned(borrowed.arena.fd);
  std::byte* const arena = map(borrowed.arena);
  if (arena == nullptr) return false;
  std::memset(arena + borrowed.offset.count, value, static_cast<std::size_t>(borrowed.bytes.count));
  munmap(arena, static_cast<std::size_t>(borrowed.arena.bytes.count));
  return true;
}

// Says for every byte of an arena which loan it belongs to.
std::vector<int> filled(const SharedMemory& arena) {
  const std::byte* const bytes = map(arena);
  std::vector<int> values;
  for (std::int64_t i = 0; i < arena.bytes.count; ++i) values.push_back(std::to_integer<int>(bytes[i]));
  munmap(const_cast<std::byte*>(bytes), static_cast<std::size_t>(arena.bytes.count));
  return values;
}

std::set<int> open_descriptors() {
  std::set<int> open;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    open.insert(std::stoi(entry.path().filename()));
  }
  std::set<int> still;  // not that of the listing
  for (const int number : open) {
    if (fcntl(number, F_GETFD) >= 0) still.insert(number);
  }
  return still;
}

/// A lender's process: lends 64 KiB to rank 1, says so, then does as it is told until it is told no more.
bool lends(const Line& line, const std::function<void()>& before_it_says = {}) {
  const SharedArena arena(kArena);
  Lender lender(0);
  line.say(lender.address());
  lender.lend(arena.told, {{1, Bytes{4096}, Bytes{65536}}}, kLong);
  if (before_it_says) before_it_says();
  line.say("lent");
  for (std::string told = line.hear(); !told.empty(); told = line.hear()) {
    if (told == "close") lender.close();
    if (told == "lent?") line.say(lender.lent(1));
    if (told == "end") return true;
    if (told != "lent?") line.say("done");
  }
  return false;
}

/// A borrower's process, of rank 1.
bool borrows(const Line& line, const std::function<void()>& before_it_says = {}) {
  Borrower borrower(1, 0, line.hear(), kLong);
  const Descriptor arena(borrower.receive(kLong).arena.fd);
  if (before_it_says) before_it_says();
  line.say("received");
  for (std::string told = line.hear(); !told.empty(); told = line.hear()) {
    if (told == "close") borrower.close();
    if (told == "allowed?") line.say(borrower.allowed());
    if (told.starts_with("give back ")) borrower.give_back(Bytes{std::stoll(told.substr(10))});
    if (told == "end") return true;
    if (told != "allowed?") line.say("done");
  }
  return false;
}

/// A child that lives on after its parent, with all descriptors of it, until it is killed.
pid_t fork_worker() {
  const pid_t worker = fork();
  if (worker == 0) {
    alarm(60);  // should the test fail before it does that
    while (true) pause();
  }
  return worker;
}

std::string ask(const Process& process, const std::string& what) {
  process.line().say(what);
  return process.line().hear();
}

// ---- what arrives ------------------------------------------------------------------------------------------------

TEST(Lending, BorrowerGetsItsRangeAndWhatItWritesThereTheLenderSees) {
  Process borrower([](const Line& line) {
    Borrower borrower(1, 0, line.hear(), kLong);
    const Borrowed got = borrower.receive(kLong);
    bool right = got.offset == Bytes{4096} && got.bytes == Bytes{65536} && got.arena.bytes == kArena;
    for (std::size_t i = 0; i < got.arena.handle.size(); ++i) right &= got.arena.handle[i] == std::byte(i + 1);
    right &= fill(got, 7);
    line.say("written");
    return line.hear() == "end" && right;
  });
  const SharedArena arena(kArena);
  Lender lender(0);
  borrower.line().say(lender.address());
  lender.lend(arena.told, {{1, Bytes{4096}, Bytes{65536}}}, kLong);
  EXPECT_EQ(lender.lent(1), Bytes{65536});
  ASSERT_EQ(borrower.line().hear(), "written");
  const std::vector<int> found = filled(arena.told);
  std::vector<int> expected(static_cast<std::size_t>(kArena.count), 0);
  std::fill_n(expected.begin() + 4096, 65536, 7);
  EXPECT_EQ(found, expected);
  borrower.line().say("end");
  EXPECT_TRUE(borrower.succeeded());
}

TEST(Lending, ArenaWithoutADescriptorIsToldByItsHandleAlone) {
  SharedMemory arena{kArena, -1, {}};
  arena.handle[63] = std::byte{9};
  Lender lender(0);
  Borrower borrower(1, 0, lender.address(), kLong);
  lender.lend(arena, {{1, Bytes{0}, kArena}}, kLong);
  const Borrowed got = borrower.receive(kLong);
  EXPECT_EQ(got.arena.fd, -1);
  EXPECT_EQ(got.arena.handle, arena.handle);
}

TEST(Lending, ThreeBorrowersOfTwoLendersGetTheirOwnRanges) {
  struct Part {
    int lender, borrower;
    Bytes offset, bytes;
  };
  const std::vector<Part> parts{{0, 2, Bytes{0}, Bytes{1000}},
                                {0, 3, Bytes{1000}, Bytes{24}},
                                {1, 3, Bytes{512}, Bytes{512}},
                                {1, 4, Bytes{2048}, Bytes{4096}}};
  std::map<int, std::unique_ptr<Process>> processes;
  for (const int rank : {2, 3, 4}) {
    processes[rank] = std::make_unique<Process>([&, rank](const Line& line) {
      const std::array<std::string, 2> addresses{line.hear(), line.hear()};
      std::map<int, std::unique_ptr<Borrower>> borrowers;
      for (const Part& part : parts) {
        if (part.borrower != rank) continue;
        const std::string& address = addresses.at(static_cast<std::size_t>(part.lender));
        borrowers[part.lender] = std::make_unique<Borrower>(rank, part.lender, address, kLong);
      }
      bool right = true;
      for (const auto& [from, borrower] : borrowers) right &= fill(borrower->receive(kLong), 10 * from + rank);
      line.say("written");
      return line.hear() == "end" && right;
    });
  }
  const std::array<SharedArena, 2> arenas{SharedArena(kArena), SharedArena(kArena)};
  Lender first(0), second(1);
  for (const auto& [rank, process] : processes) {
    process->line().say(first.address());
    process->line().say(second.address());
  }
  for (const int from : {0, 1}) {
    std::vector<Loan> loans;
    for (const Part& part : parts) {
      if (part.lender == from) loans.push_back({part.borrower, part.offset, part.bytes});
    }
    (from == 0 ? first : second).lend(arenas.at(static_cast<std::size_t>(from)).told, loans, kLong);
  }
  for (const auto& [rank, process] : processes) ASSERT_EQ(process->line().hear(), "written");
  for (const int from : {0, 1}) {
    std::vector<int> expected(static_cast<std::size_t>(kArena.count), 0);
    for (const Part& part : parts) {
      if (part.lender == from) {
        std::fill_n(expected.begin() + part.offset.count, part.bytes.count, 10 * from + part.borrower);
      }
    }
    EXPECT_EQ(filled(arenas.at(static_cast<std::size_t>(from)).told), expected);
  }
  for (const auto& [rank, process] : processes) {
    process->line().say("end");
    EXPECT_TRUE(process->succeeded());
  }
}

TEST(Lending, RanksThatLendToEachOtherInACircleDoNotBlock) {
  constexpr int kRanks = 3;
  std::vector<std::unique_ptr<Process>> processes;
  for (int rank = 0; rank < kRanks; ++rank) {
    processes.push_back(std::make_unique<Process>([rank](const Line& line) {
      const int before = (rank + kRanks - 1) % kRanks;
      const SharedArena arena(kArena);
      Lender lender(rank);
      line.say(lender.address());
      Borrower borrower(rank, before, line.hear(), kLong);
      lender.lend(arena.told, {{(rank + 1) % kRanks, Bytes{0}, Bytes{64 + rank}}}, kLong);
      const Borrowed got = borrower.receive(kLong);
      const Descriptor owned(got.arena.fd);
      line.say("received");
      return line.hear() == "end" && got.bytes == Bytes{64 + before};
    }));
  }
  std::vector<std::string> addresses;
  for (const auto& process : processes) addresses.push_back(process->line().hear());
  for (int rank = 0; rank < kRanks; ++rank) processes[rank]->line().say(addresses[(rank + kRanks - 1) % kRanks]);
  for (const auto& process : processes) EXPECT_EQ(process->line().hear(), "received");
  for (const auto& process : processes) process->line().say("end");
  for (const auto& process : processes) EXPECT_TRUE(process->succeeded());
}

TEST(Lending, AddressIsPrintableAndUnique) {
  std::set<std::string> addresses;
  for (int i = 0; i < 10; ++i) {
    const Lender lender(0);
    for (const char c : lender.address()) EXPECT_TRUE(c > ' ' && c <= '~');
    addresses.insert(lender.address());
  }
  EXPECT_EQ(addresses.size(), 10U);
}

// ---- what is refused ---------------------------------------------------------------------------------------------

TEST(Lending, NothingIsLentTwiceNorOutsideOfTheArenaAndNoBorrowerIsServedThen) {
  const SharedArena arena(kArena);
  const Bytes end = kArena;
  const std::vector<std::vector<Loan>> wrong{
      {{1, Bytes{0}, Bytes{100}}, {2, Bytes{99}, Bytes{1}}},    // the last byte of another
      {{1, Bytes{50}, Bytes{50}}, {2, Bytes{0}, Bytes{51}}},    // the first byte of another
      {{1, Bytes{10}, Bytes{10}}, {2, Bytes{0}, Bytes{100}}},   // all of another
      {{1, Bytes{0}, Bytes{100}}, {1, Bytes{200}, Bytes{10}}},  // one borrower
      {{1, Bytes{1}, end}},
      {{1, end, Bytes{1}}},
      {{1, Bytes{-1}, Bytes{2}}},
      {{1, Bytes{0}, Bytes{0}}},
      {{1, Bytes{0}, Bytes{-1}}},
      {{1, Bytes{1}, Bytes{INT64_MAX}}},
      {{1, Bytes{INT64_MAX}, Bytes{1}}},
  };
  Lender lender(0);
  Borrower first(1, 0, lender.address(), kLong), second(2, 0, lender.address(), kLong);
  for (const auto& loans : wrong) EXPECT_THROW(lender.lend(arena.told, loans, kLong), InvariantError);
  EXPECT_TRUE(contains(error_of([&] { (void)first.receive(milliseconds{0}); }), "has not lent within 0 ms"));
  // Ranges that touch are none that overlap; the same lender, the same borrowers.
  lender.lend(arena.told, {{1, Bytes{100}, end - Bytes{100}}, {2, Bytes{0}, Bytes{100}}}, kLong);
  const Borrowed got = first.receive(kLong), also_got = second.receive(kLong);
  const Descriptor one(got.arena.fd), other(also_got.arena.fd);
  EXPECT_EQ(got.offset + got.bytes, end);
  EXPECT_EQ(also_got.offset + also_got.bytes, got.offset);
  EXPECT_THROW(lender.lend(arena.told, {}, kLong), InvariantError);
}

TEST(Lending, StrangerIsDroppedAndTheBorrowerIsServed) {
  const SharedArena arena(kArena);
  Lender lender(0);
  std::string wrong_token = lender.address();
  wrong_token.back() = wrong_token.back() == 'a' ? 'b' : 'a';
  Borrower stranger(1, 0, wrong_token, kLong);
  Borrower not_awaited(5, 0, lender.address(), kLong);
  const std::string name = lender.address().substr(lender.address().find(':') + 1, 32);
  const auto mute = Peer::connect(name, kLong), rude = Peer::connect(name, kLong), wordy = Peer::connect(name, kLong);
  ASSERT_TRUE(mute && rude && wordy);
  const std::vector<std::byte> noise(10'000);
  EXPECT_TRUE(rude->send(std::span(noise).first(3)));
  EXPECT_TRUE(wordy->send(noise, {0, 1, 2}));
  Borrower borrower(1, 0, lender.address(), kLong);
  Borrower twin(1, 0, lender.address(), kLong);
  lender.lend(arena.told, {{1, Bytes{0}, Bytes{4096}}}, kLong);
  const Descriptor owned(borrower.receive(kLong).arena.fd);
  for (Borrower* const dropped : {&stranger, &not_awaited, &twin}) {
    EXPECT_TRUE(contains(error_of([&] { (void)dropped->receive(kLong); }), "closed without lending"));
  }
  EXPECT_EQ(lender.lent(1), Bytes{4096});
  // The door is closed behind them.
  EXPECT_TRUE(contains(error_of([&] { Borrower(2, 0, lender.address(), kLong); }), "rank 0"));
}

TEST(Lending, BorrowerThatIsNotAwaitedTakesNoOthersPlace) {
  Process comers([](const Line& line) {
    const std::string address = line.hear();
    Borrower not_awaited(5, 0, address, kLong);
    const bool dropped = contains(error_of([&] { (void)not_awaited.receive(kLong); }), "closed without lending");
    Borrower borrower(1, 0, address, kLong);  // only now
    const Descriptor owned(borrower.receive(kLong).arena.fd);
    return dropped;
  });
  const SharedArena arena(kArena);
  Lender lender(0);
  comers.line().say(lender.address());
  EXPECT_EQ(error_of([&] { lender.lend(arena.told, {{1, Bytes{0}, Bytes{4096}}}, kLong); }), "");
  lender.close();
  EXPECT_TRUE(comers.succeeded());
}

TEST(Lending, AnotherUserIsNoPeer) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  Process other([](const Line& line) {
    if (setuid(65534) != 0) return false;
    const std::string name = line.hear();
    const Descriptor raw(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::copy(name.begin(), name.end(), address.sun_path + 1);
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    const bool connected = connect(raw.number(), reinterpret_cast<const sockaddr*>(&address), size) == 0;
    line.say("connected");
    const bool dropped = recv(raw.number(), &address, sizeof address, 0) <= 0;
    const std::string refused = error_of([&] { Borrower(1, 0, line.hear(), kLong); });
    return connected && dropped && contains(refused, "rank 0, which is to lend to this rank, cannot be reached");
  });
  const std::string name = random_name();
  const Descriptor listener = listen_as(name);
  other.line().say(name);
  ASSERT_EQ(other.line().hear(), "connected");
  EXPECT_FALSE(Peer::accept(listener));
  const Lender lender(0);
  other.line().say(lender.address());
  EXPECT_TRUE(other.succeeded());
}

TEST(Lending, LateOnesAreNamed) {
  const SharedArena arena(kArena);
  Lender lender(4);
  Borrower borrower(1, 4, lender.address(), kLong);
  const std::string late_lender = error_of([&] { (void)borrower.receive(kShort); });
  EXPECT_EQ(late_lender, "rank 4, which is to lend to this rank, has not lent within 20 ms");
  const std::string late_borrower =
      error_of([&] { lender.lend(arena.told, {{1, Bytes{0}, Bytes{4096}}, {7, Bytes{4096}, Bytes{65536}}}, kShort); });
  EXPECT_TRUE(contains(late_borrower, "rank 7, which is to borrow 64.0 KiB of rank 4, has not come within 20 ms"))
      << late_borrower;
  // Who had come learns at once that nothing will.
  const std::string told = error_of([&] { (void)borrower.receive(kLong); });
  EXPECT_TRUE(contains(told, "rank 4, which is to lend to this rank, has ended, or closed without lending")) << told;
}

TEST(Lending, SignalsDoNotEndAWait) {
  struct sigaction counts{}, before{};
  static volatile sig_atomic_t num_signals;
  num_signals = 0;
  counts.sa_handler = [](int) { num_signals = num_signals + 1; };  // without SA_RESTART
  sigaction(SIGALRM, &counts, &before);
  const itimerval every_ms{{0, 1000}, {0, 1000}}, never{};
  setitimer(ITIMER_REAL, &every_ms, nullptr);
  const SharedArena arena(kArena);
  Lender lender(4);
  Borrower borrower(1, 4, lender.address(), kLong);
  EXPECT_TRUE(contains(error_of([&] { (void)borrower.receive(kShort); }), "has not lent within 20 ms"));
  EXPECT_TRUE(contains(
      error_of([&] { lender.lend(arena.told, {{1, Bytes{0}, Bytes{4096}}, {7, Bytes{4096}, Bytes{1}}}, kShort); }),
      "has not come within 20 ms"));
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &before, nullptr);
  EXPECT_GT(num_signals, 0);
}

// ---- the words ---------------------------------------------------------------------------------------------------

TEST(Lending, WhatIsAskedBackAndWhatIsGivenBackIsRead) {
  Process borrower([](const Line& line) { return borrows(line); });
  const SharedArena arena(kArena);
  Lender lender(0);
  borrower.line().say(lender.address());
  lender.lend(arena.told, {{1, Bytes{0}, Bytes{65536}}}, kLong);
  ASSERT_EQ(borrower.line().hear(), "received");
  EXPECT_EQ(ask(borrower, "allowed?"), "65536");
  lender.ask_back(1, Bytes{1024});
  EXPECT_EQ(ask(borrower, "allowed?"), "1024");
  EXPECT_EQ(lender.lent(1), Bytes{65536});  // asked for, not yet given
  EXPECT_EQ(ask(borrower, "give back 2048"), "done");
  EXPECT_EQ(lender.lent(1), Bytes{2048});
  EXPECT_EQ(ask(borrower, "allowed?"), "1024");
  EXPECT_EQ(ask(borrower, "give back 1024"), "done");
  EXPECT_EQ(lender.lent(1), Bytes{1024});
  EXPECT_THROW(lender.ask_back(1, Bytes{1025}), InvariantError);
  EXPECT_THROW(lender.ask_back(1, Bytes{-1}), InvariantError);
  EXPECT_THROW(lender.ask_back(2, Bytes{0}), InvariantError);
  EXPECT_EQ(lender.lent(2), Bytes{0});
  borrower.line().say("end");
  EXPECT_TRUE(borrower.succeeded());
}

TEST(Lending, WordsOfSeveralBorrowersAreApart) {
  const SharedArena arena(kArena);
  Lender lender(0);
  Borrower first(1, 0, lender.address(), kLong), second(2, 0, lender.address(), kLong);
  lender.lend(arena.told, {{2, Bytes{0}, Bytes{200}}, {1, Bytes{200}, Bytes{100}}}, kLong);
  const Descriptor one(first.receive(kLong).arena.fd), other(second.receive(kLong).arena.fd);
  lender.ask_back(1, Bytes{10});
  second.give_back(Bytes{20});
  EXPECT_EQ(first.allowed(), Bytes{10});
  EXPECT_EQ(second.allowed(), Bytes{200});
  EXPECT_EQ(lender.lent(1), Bytes{100});
  EXPECT_EQ(lender.lent(2), Bytes{20});
  EXPECT_THROW(second.give_back(Bytes{21}), InvariantError);
}

// ---- ends --------------------------------------------------------------------------------------------------------

const std::string kGone = "rank 0, which lends 64.0 KiB to this rank, is gone";

TEST(Lending, LenderThatIsKilledIsMissed) {
  Process lender([](const Line& line) { return lends(line); });
  Borrower borrower(1, 0, lender.line().hear(), kLong);
  const Borrowed got = borrower.receive(kLong);
  ASSERT_EQ(lender.line().hear(), "lent");
  EXPECT_NO_THROW(borrower.check());
  lender.kill();
  EXPECT_EQ(error_of([&] { borrower.check(); }), kGone);
  EXPECT_TRUE(fill(got, 3));  // the arena is there as long as a process has it
  borrower.close();
}

TEST(Lending, LenderThatIsKilledIsMissedAlsoWhileItsWorkerHoldsTheConnection) {
  Process lender([](const Line& line) { return lends(line, [&line] { line.say(Bytes{fork_worker()}); }); });
  Borrower borrower(1, 0, lender.line().hear(), kLong);
  const Descriptor arena(borrower.receive(kLong).arena.fd);
  const auto worker = static_cast<pid_t>(std::stol(lender.line().hear()));
  ASSERT_EQ(lender.line().hear(), "lent");
  EXPECT_NO_THROW(borrower.check());
  lender.kill();
  EXPECT_EQ(::kill(worker, 0), 0);
  EXPECT_EQ(error_of([&] { borrower.check(); }), kGone);
  ::kill(worker, SIGKILL);
}

// Nothing is refused to the process but what opens a pidfd.
bool refuse_pidfds() {
  std::array<sock_filter, 4> filter{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 434, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(Lending, WherePidfdsAreRefusedTheConnectionTellsOfTheEnd) {
  Process lender([](const Line& line) { return lends(line); });
  Process borrower([](const Line& line) {
    if (!refuse_pidfds()) return false;
    Borrower borrower(1, 0, line.hear(), kLong);
    const Descriptor arena(borrower.receive(kLong).arena.fd);
    borrower.check();
    line.say("received");
    line.hear();
    line.say(error_of([&] { borrower.check(); }));
    return true;
  });
  borrower.line().say(lender.line().hear());
  ASSERT_EQ(lender.line().hear(), "lent");
  ASSERT_EQ(borrower.line().hear(), "received");
  lender.kill();
  EXPECT_EQ(ask(borrower, "it is dead"), kGone);
  EXPECT_TRUE(borrower.succeeded());
}

TEST(Lending, NothingIsLentToABorrowerThatWasKilled) {
  for (const bool has_worker : {false, true}) {
    pid_t worker = 0;
    Process borrower([has_worker](const Line& line) {
      return borrows(line, [&] { line.say(Bytes{has_worker ? fork_worker() : 0}); });
    });
    const SharedArena arena(kArena);
    Lender lender(0);
    borrower.line().say(lender.address());
    lender.lend(arena.told, {{1, Bytes{0}, Bytes{65536}}}, kLong);
    worker = static_cast<pid_t>(std::stol(borrower.line().hear()));
    ASSERT_EQ(borrower.line().hear(), "received");
    EXPECT_EQ(lender.lent(1), Bytes{65536});
    borrower.kill();
    EXPECT_TRUE(!has_worker || ::kill(worker, 0) == 0);
    EXPECT_EQ(lender.lent(1), Bytes{0});
    if (has_worker) ::kill(worker, SIGKILL);
  }
}

TEST(Lending, LenderThatEndsBeforeItLendsIsNamedAtOnce) {
  Process lender([](const Line& line) {
    const Lender lender(0);
    line.say(lender.address());
    line.say(Bytes{fork_worker()});
    line.hear();
    return false;
  });
  const std::string address = lender.line().hear();
  const auto worker = static_cast<pid_t>(std::stol(lender.line().hear()));
  Borrower borrower(1, 0, address, kLong);
  lender.kill();
  EXPECT_EQ(error_of([&] { (void)borrower.receive(kLong); }), "rank 0, which is to lend to this rank, is gone");
  // The worker keeps the listener too, and never looks at it.
  Borrower late(1, 0, address, kLong);
  EXPECT_EQ(error_of([&] { (void)late.receive(kLong); }), "rank 0, which is to lend to this rank, is gone");
  ::kill(worker, SIGKILL);
}

TEST(Lending, BorrowerThatEndsBeforeItIsServedIsNamed) {
  Process borrower([](const Line& line) {
    const Borrower borrower(1, 0, line.hear(), kLong);
    line.say(Bytes{fork_worker()});
    line.hear();
    return false;
  });
  const SharedArena arena(kArena);
  Lender lender(0);
  borrower.line().say(lender.address());
  const auto worker = static_cast<pid_t>(std::stol(borrower.line().hear()));
  borrower.kill();
  EXPECT_EQ(error_of([&] { lender.lend(arena.told, {{1, Bytes{0}, Bytes{65536}}}, kLong); }),
            "rank 1, which is to borrow 64.0 KiB of rank 0, is gone");
  ::kill(worker, SIGKILL);
}

TEST(Lending, LenderMayCloseFirst) {
  Process lender([](const Line& line) { return lends(line); });
  Borrower borrower(1, 0, lender.line().hear(), kLong);
  const Borrowed got = borrower.receive(kLong);
  ASSERT_EQ(lender.line().hear(), "lent");
  EXPECT_EQ(ask(lender, "close"), "done");
  EXPECT_EQ(ask(lender, "close"), "done");
  EXPECT_NO_THROW(borrower.check());
  lender.line().say("end");
  EXPECT_TRUE(lender.succeeded());
  EXPECT_NO_THROW(borrower.check());
  EXPECT_EQ(borrower.allowed(), Bytes{65536});
  borrower.give_back(Bytes{5});
  EXPECT_TRUE(fill(got, 1));
  borrower.close();
  borrower.close();
  EXPECT_THROW((void)borrower.allowed(), InvariantError);
}

TEST(Lending, LenderOfMemoryThatEndsWithItIsMissedAlsoWhenItHasClosed) {
  Process lender([](const Line& line) {
    Lender lender(0);
    line.say(lender.address());
    lender.lend({kArena, -1, {}}, {{1, Bytes{4096}, Bytes{65536}}}, kLong);
    lender.leave();
    lender.close();
    line.say("closed");
    return line.hear() == "end";
  });
  Borrower borrower(1, 0, lender.line().hear(), kLong);
  (void)borrower.receive(kLong);
  ASSERT_EQ(lender.line().hear(), "closed");
  EXPECT_NO_THROW(borrower.check());
  lender.line().say("end");
  EXPECT_TRUE(lender.succeeded());
  EXPECT_EQ(error_of([&] { borrower.check(); }), kGone);
}

TEST(Lending, LenderThatHasLeftHearsOfItsLoansAndIsNotMissed) {
  auto listening = std::make_unique<Process>([](const Line& line) {
    const SharedArena arena(kArena);
    Lender lender(0);
    line.say(lender.address());
    lender.lend(arena.told, {{1, Bytes{4096}, Bytes{65536}}}, kLong);
    lender.leave();
    line.say("left");
    for (std::string told = line.hear(); told == "lent?"; told = line.hear()) line.say(lender.lent(1));
    return true;
  });
  Borrower borrower(1, 0, listening->line().hear(), kLong);
  const Descriptor arena(borrower.receive(kLong).arena.fd);
  ASSERT_EQ(listening->line().hear(), "left");
  EXPECT_EQ(ask(*listening, "lent?"), "65536");
  borrower.give_back(Bytes{5});
  EXPECT_EQ(ask(*listening, "lent?"), "5");
  listening->kill();
  EXPECT_NO_THROW(borrower.check());
}

TEST(Lending, NothingIsLentToABorrowerThatHasClosedBeforeItWasTold) {
  const SharedArena arena(kArena);
  Lender lender(0);
  Borrower borrower(1, 0, lender.address(), kLong);
  borrower.close();
  EXPECT_EQ(error_of([&] { lender.lend(arena.told, {{1, Bytes{0}, Bytes{65536}}}, kLong); }),
            "rank 1, which is to borrow 64.0 KiB of rank 0, is gone");
  EXPECT_EQ(lender.lent(1), Bytes{0});
}

TEST(Lending, BorrowerMayCloseFirst) {
  Process lender([](const Line& line) { return lends(line); });
  Borrower borrower(1, 0, lender.line().hear(), kLong);
  const Descriptor arena(borrower.receive(kLong).arena.fd);
  ASSERT_EQ(lender.line().hear(), "lent");
  EXPECT_EQ(ask(lender, "lent?"), "65536");
  borrower.close();
  EXPECT_EQ(ask(lender, "lent?"), "0");
  EXPECT_EQ(ask(lender, "close"), "done");
  lender.line().say("end");
  EXPECT_TRUE(lender.succeeded());
}

TEST(Lending, OfferThatIsNotReceivedIsNotLentAfterTheBorrowerHasClosed) {
  const SharedArena arena(kArena);
  Lender lender(0);
  Borrower borrower(1, 0, lender.address(), kLong);
  lender.lend(arena.told, {{1, Bytes{0}, Bytes{65536}}}, kLong);
  EXPECT_THROW((void)borrower.allowed(), InvariantError);
  EXPECT_EQ(lender.lent(1), Bytes{65536});
  const std::size_t before = open_descriptors().size();
  borrower.close();
  EXPECT_EQ(lender.lent(1), Bytes{0});
  EXPECT_EQ(open_descriptors().size(), before - 2);  // the connection and the pidfd, and the arena does not stay
}

// ---- what is left behind -----------------------------------------------------------------------------------------

TEST(Lending, ForkedChildKeepsItsHandsOffWhatIsTheParents) {
  const SharedArena arena(kArena);
  Lender lender(0);
  Borrower borrower(1, 0, lender.address(), kLong);
  lender.lend(arena.told, {{1, Bytes{0}, Bytes{65536}}}, kLong);
  const Descriptor owned(borrower.receive(kLong).arena.fd);
  Process child([&](const Line&) {
    const std::set<int> before = open_descriptors();
    bool refused = true;
    for (const std::function<void()>& call : std::vector<std::function<void()>>{
             [&] { lender.ask_back(1, Bytes{1}); }, [&] { (void)lender.lent(1); }, [&] { borrower.check(); },
             [&] { borrower.give_back(Bytes{1}); }, [&] { (void)borrower.allowed(); }}) {
      try {
        call();
        refused = false;
      } catch (const InvariantError&) {
      }
    }
    lender.close();
    borrower.close();
    return refused && open_descriptors() == before;
  });
  EXPECT_TRUE(child.succeeded());
  EXPECT_NO_THROW(borrower.check());
  EXPECT_EQ(lender.lent(1), Bytes{65536});
  EXPECT_EQ(borrower.allowed(), Bytes{65536});
}

TEST(Lending, EveryDescriptorIsClosedOnExec) {
  const SharedArena arena(kArena);
  const std::set<int> before = open_descriptors();
  Lender lender(0), waiting(2);
  Borrower borrower(1, 0, lender.address(), kLong);
  lender.lend(arena.told, {{1, Bytes{0}, Bytes{65536}}}, kLong);
  const Descriptor owned(borrower.receive(kLong).arena.fd);
  int num_new = 0;
  for (const int number : open_descriptors()) {
    if (before.contains(number)) continue;
    ++num_new;
    EXPECT_TRUE((fcntl(number, F_GETFD) & FD_CLOEXEC) != 0) << number;
  }
  EXPECT_EQ(num_new, 6);  // a listener; a connection and a pidfd on each side; the borrowed arena
}

std::set<std::string> listing(const std::string& folder) {
  std::set<std::string> names;
  std::error_code absent;
  for (const auto& entry : std::filesystem::directory_iterator(folder, absent)) names.insert(entry.path().filename());
  return names;
}

TEST(Lending, KilledProcessesLeaveNothing) {
  const std::set<int> before = open_descriptors();
  const std::set<std::string> shared_before = listing("/dev/shm");
  std::vector<std::string> names;
  for (int round = 0; round < 5; ++round) {
    Process lending([](const Line& line) { return lends(line); });
    Process borrowing([](const Line& line) { return borrows(line); });
    const std::string address = lending.line().hear();
    Borrower borrower(1, 0, address, kLong);
    const Descriptor owned(borrower.receive(kLong).arena.fd);
    ASSERT_EQ(lending.line().hear(), "lent");
    const SharedArena arena(kArena);
    Lender lender(0);
    borrowing.line().say(lender.address());
    lender.lend(arena.told, {{1, Bytes{0}, Bytes{65536}}}, kLong);
    ASSERT_EQ(borrowing.line().hear(), "received");
    lending.kill();
    borrowing.kill();
    EXPECT_EQ(error_of([&] { borrower.check(); }), kGone);
    EXPECT_EQ(lender.lent(1), Bytes{0});
    for (const std::string& each : {address, lender.address()}) names.push_back(each.substr(each.find(':') + 1, 32));
  }
  EXPECT_EQ(open_descriptors(), before);
  EXPECT_EQ(listing("/dev/shm"), shared_before);
  std::ifstream sockets("/proc/net/unix");
  const std::string all{std::istreambuf_iterator<char>(sockets), std::istreambuf_iterator<char>()};
  EXPECT_FALSE(all.empty());
  for (const std::string& name : names) EXPECT_FALSE(contains(all, name));
}

}  // namespace
}  // namespace noria
