// Ranges of one process's arena in the hands of other processes of the machine: given out once, then never spoken of
// again but by words in shared memory.
//
// What travels is the arena's description (device/backend.h: SharedMemory). Its bytes are not touched here: a borrower
// opens them by its own backend, and swaps in and out of its range by itself.
//
// Units: bytes, by offset in the lender's arena; processes by rank.
// Ownership: each side owns its descriptors and its mapping of the words, and neither the arena. Nothing of it has a
//   name in the file system: a killed process leaves nothing. In a forked child every verb fails and closing does
//   nothing, for what is there is the parent's.
// Liveness: the connection stays open, says nothing more, and tells that the other process has ended: see Note [Who has
//   ended] in store/local_peer.h.
// Order: all ranks make their Lender, tell each other the addresses, make their Borrowers, lend, and receive. No step
//   waits for a later one of another rank, so ranks that lend to each other in a circle do not block.
// Threads: the caller serialises the calls on one object. A wait is bounded by its timeout, and signals do not end it.
//
// Note [Words that only fall]. Lender and borrower share one line: how much is wanted to be left, written by the lender
// alone, and how much may be in use, written by the borrower alone. Both start at the whole range and only fall, so a
// word that is read late errs on the safe side, and no two of them need be read at once. What was given back does not
// return: to take it again would need an agreement.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>

#include "base/bytes.h"
#include "device/backend.h"

namespace noria {

/// What a borrower gets of its lender's arena.
struct Loan {
  int borrower = -1;
  Bytes offset, bytes;
};

/// What a borrower has got. The arena's `fd`, if it has one, is the receiver's to close.
struct Borrowed {
  SharedMemory arena;
  Bytes offset, bytes;
};

class Lender {
 public:
  /// Listens on a socket without a file, under a random name.
  explicit Lender(int rank);
  ~Lender();
  Lender(const Lender&) = delete;  // others hold the other end
  Lender& operator=(const Lender&) = delete;

  /// Printable, to be told to the borrowers by any way; whoever of this user knows it may come as any of them.
  const std::string& address() const { return address_; }

  /// Waits until the borrowers of all loans have come, then tells each its range. Once. Loans that overlap, leave the
  /// arena or are of one borrower: InvariantError before anybody is listened to, and nothing has happened. A borrower
  /// that does not come, or has ended: MachineError that names it; then only `close` is left. Who connects without the
  /// address's token, or as another user, is dropped. `arena.fd` stays the caller's.
  void lend(const SharedMemory& arena, const std::vector<Loan>& loans, std::chrono::milliseconds timeout);

  /// The borrower shall soon use no more than the first `left` bytes of its range; never more than was asked before.
  void ask_back(int borrower, Bytes left);
  /// How much of its range, from the front, the borrower may be using still: its last word; nothing once it has closed
  /// or ended, and where it was told of no range.
  Bytes lent(int borrower) const;

  /// From now on this process may end, where the arena outlives it. What is lent stays lent, and `lent` tells of it.
  void leave();
  /// As `leave`, and nobody hears here any more of what is lent; the arena must outlive its use all the same.
  /// Idempotent, in any order with the borrowers' own, waits for nobody.
  void close();

 private:
  struct State;
  State& state() const;
  pid_t process_;  // whose it is
  std::string address_;
  std::unique_ptr<State> state_;  // null: closed
};

class Borrower {
 public:
  /// Connects and says who it is. Does not wait for the lender to look. MachineError: nobody is there any more.
  Borrower(int rank, int lender, const std::string& address, std::chrono::milliseconds timeout);
  ~Borrower();
  Borrower(const Borrower&) = delete;  // the lender holds the other end
  Borrower& operator=(const Borrower&) = delete;

  /// Once. MachineError that names the lender when it is late, or has ended or closed without lending.
  Borrowed receive(std::chrono::milliseconds timeout);

  /// How much of the range, from the front, the lender wants to see used: to be looked at between steps.
  Bytes allowed() const;
  /// From now on no more than that is used: copies to and from the rest have passed. Never more than before.
  void give_back(Bytes left);
  /// Throws MachineError once the lender's process has ended, and what it has lent with it. Of memory that is told by a
  /// descriptor the lender may end when it has closed: what others have open stays.
  void check() const;

  /// Gives back all. Idempotent, in any order with the lender's own, waits for nobody.
  void close();

 private:
  struct State;
  State& state() const;
  State& received() const;
  pid_t process_;                 // whose it is
  std::unique_ptr<State> state_;  // null: closed
};

}  // namespace noria
