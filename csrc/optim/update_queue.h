// Jobs that wait for their turn: the most urgent of those whose waits have passed comes out next; if there is none, the
// one whose waits were issued first.
//
// Ownership: shared with the callbacks of the tickets that the jobs wait for, which may outlive the optimizer.
// Order: see optim/host_optimizer.h. Threads: `push`, `recall`, `holds`, `close` and `await_idle` from any thread, the
// rest from the one thread that serves.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "device/host_ticket.h"
#include "optim/host_optimizer.h"

namespace noria {

struct QueuedUpdate {
  OpLabel label;
  UpdateJob job;
  std::vector<Ticket> waits;
  std::shared_ptr<HostTicket> ticket;
  int priority = 0;
  bool is_recalled = false;  // protected by the queue's mutex until it is taken
  OpId newest_wait;          // a device passes what was issued first
  std::int64_t submitted_ns = 0;
  int num_unissued = 0;            // of `waits`; protected by the queue's mutex
  Verb last_giver = Verb::update;  // whose ticket was the last to be issued: the one to blame for a stall
};

class UpdateQueue : public std::enable_shared_from_this<UpdateQueue> {
 public:
  using Item = std::shared_ptr<QueuedUpdate>;

  /// False when the queue is closed; the item is not taken then.
  bool push(const Item& item);

  /// True: the item of this ticket was queued, and keeps its place only until its waits have passed; if they have, its
  /// ticket passes now.
  bool recall(const Ticket& ticket);

  /// True while the item of this ticket has not been taken.
  bool holds(const Ticket& ticket);

  struct Taken {
    Item item;               // null: the queue was closed
    bool was_ready = false;  // nobody had to wait for it
  };
  /// Blocks for the next item. The one before it counts as running until this is called.
  Taken take();
  /// Sleeps until the clock shows `deadline_ns`, or the queue is closed: then false.
  bool sleep_until(std::int64_t deadline_ns);
  /// Whatever is left after closing.
  std::deque<Item> take_rest();

  void close();
  void await_idle();

 private:
  Item next();
  void issued(const Item& item, Verb giver);

  std::mutex mutex_;  // protects all below
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool running_ = false;
  bool closing_ = false;
};

}  // namespace noria
