// Lends ranges of one process's arena to other processes of the same machine. After the handover, lender and borrower
// talk only through words in shared memory.
//
// Only the arena's description travels (device/backend.h: SharedMemory). The bytes of the arena are not touched here. A
// borrower opens them with its own backend, and swaps in and out of its range by itself.
//
// Units: bytes, by offset in the lender's arena; processes by rank.
// Ownership: each side owns its descriptors and its mapping of the words; neither owns the arena. Nothing here has a
// name in the file system, so a killed process leaves nothing behind. In a forked child every other member fails and
// `close` does nothing, because all of it belongs to the parent.
// Liveness: the connection stays open, carries no more packets, and tells that the other process has ended: see Note
// [Who has ended] in store/local_peer.h.
// Order: all ranks make their Lender, tell each other the addresses, make their Borrowers, lend, and receive. No step
// waits for a later step of another rank, so ranks that lend to each other in a circle do not block.
// Threads: the caller serialises the calls on one object. Each wait is bounded by its timeout, and signals do not end
// it.
//
// Note [Words that only fall]. Lender and borrower share one cache line. Only the lender writes `wanted`: how much of
// the range it wants to leave to the borrower. Only the borrower writes `used`: how much it may be using. Both start at
// the whole range and only fall. So a word that is read late is too large, never too small. That is safe: the lender
// takes back only what `used` no longer covers. The two words need not be read at the same moment. Memory that was
// given back does not return: to take it again would need an agreement.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>

#include "base/bytes.h"
#include "device/backend.h"

namespace noria {

/// A loan is the range of the lender's arena that one borrower gets.
struct Loan {
  int borrower = -1;
  Bytes offset, bytes;
};

/// Holds what a borrower has received. The receiver must close the arena's `fd`, if there is one.
struct Borrowed {
  SharedMemory arena;
  Bytes offset, bytes;
};

class Lender {
 public:
  /// Listens on a socket that has a random name and no file.
  explicit Lender(int rank);
  ~Lender();
  Lender(const Lender&) = delete;  // others hold the other end
  Lender& operator=(const Lender&) = delete;

  /// Returns a printable address. The caller tells it to the borrowers by any channel. A process of this user that
  /// knows the address can come as any of them.
  const std::string& address() const { return address_; }

  /// Waits until the borrowers of all loans have come, then tells each its range. May be called once. `arena.fd` stays
  /// the caller's. A connection without the address's token, or of another user, is dropped. Throws InvariantError if a
  /// loan is empty, overlaps another, leaves the arena, or is the second of one borrower. Nothing has happened then.
  /// Throws MachineError that names the borrower if one does not come or has ended; then only `close` is left.
  void lend(const SharedMemory& arena, const std::vector<Loan>& loans, std::chrono::milliseconds timeout);

  /// Asks the borrower to use, soon, no more than the first `left` bytes of its range. `left` is never more than was
  /// asked before.
  void ask_back(int borrower, Bytes left);
  /// Returns how much of its range, from the front, the borrower may still be using: the last value that it wrote.
  /// Returns 0 if the borrower has closed or ended, or was told of no range.
  Bytes lent(int borrower) const;

  /// Tells the borrowers that this process may end from now on, if the arena outlives it. What is lent stays lent, and
  /// `lent` still reports it.
  void leave();
  /// Does what `leave` does, and stops reporting what is lent. The arena must still outlive its use. Idempotent; comes
  /// before or after the borrowers' own `close`; waits for no process.
  void close();

 private:
  struct State;
  State& state() const;
  pid_t process_;  // the process that made it
  std::string address_;
  std::unique_ptr<State> state_;  // null: closed
};

class Borrower {
 public:
  /// Connects and tells the lender this rank. Does not wait for the lender to accept. Throws MachineError if the lender
  /// cannot be reached.
  Borrower(int rank, int lender, const std::string& address, std::chrono::milliseconds timeout);
  ~Borrower();
  Borrower(const Borrower&) = delete;  // the lender holds the other end
  Borrower& operator=(const Borrower&) = delete;

  /// Receives the loan. May be called once. Throws MachineError that names the lender if it is late, or has ended or
  /// closed without lending.
  Borrowed receive(std::chrono::milliseconds timeout);

  /// Returns how much of the range, from the front, the lender lets this rank use. The caller looks between steps.
  Bytes allowed() const;
  /// Tells the lender that no more than `left` bytes are used from now on: copies to and from the rest have passed.
  /// `left` is never more than before.
  void give_back(Bytes left);
  /// Throws MachineError if the lender's process has ended, and with it what it has lent. If the memory has a
  /// descriptor, the lender may end after it has left or closed: memory that other processes have open stays.
  void check() const;

  /// Gives back all. Idempotent; comes before or after the lender's own `close`; waits for no process.
  void close();

 private:
  struct State;
  State& state() const;
  State& received() const;
  pid_t process_;                 // the process that made it
  std::unique_ptr<State> state_;  // null: closed
};

}  // namespace noria
