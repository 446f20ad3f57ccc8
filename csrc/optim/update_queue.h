// Queues jobs until their turn. The most urgent job whose waits have passed comes out next. If there is none, but some
// whose waits have all been issued, the one whose waits were issued first comes out.
//
// Ownership: shared with the callbacks of the tickets that the jobs wait for, which may outlive the optimizer.
// Order: see optim/host_optimizer.h.
// Threads: any thread may call `push`, `recall`, `holds`, `close` and `await_idle`. Only the serving thread calls the
//   rest.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/mutex.h"
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
  OpId newest_wait;          // the newest op of `waits`: the job with the oldest such op waits least
  std::int64_t submitted_ns = 0;
  int num_unissued = 0;            // of `waits`; protected by the queue's mutex
  Verb last_giver = Verb::update;  // giver of the ticket that was issued last: a stall is counted on it
};

class UpdateQueue : public std::enable_shared_from_this<UpdateQueue> {
 public:
  using Item = std::shared_ptr<QueuedUpdate>;

  /// Returns false if the queue is closed; then the item is not taken.
  bool push(const Item& item);

  /// Returns true if the item of this ticket was queued and not recalled before. It then comes out only to pass its
  /// ticket, when its waits have passed. If they have passed already, its ticket passes now.
  bool recall(const Ticket& ticket);

  /// Returns true while the item of this ticket has not been taken.
  bool holds(const Ticket& ticket);

  struct Taken {
    Item item;               // null: the queue was closed
    bool was_ready = false;  // the serving thread did not wait for it
  };
  /// Blocks until the next item. The item before it counts as running until this call.
  Taken take();
  /// Sleeps until the clock shows `deadline_ns`. Returns false if the queue is closed.
  bool sleep_until(std::int64_t deadline_ns);
  /// Returns what is left after `close`.
  std::deque<Item> take_rest();

  void close();
  void await_idle();

 private:
  Item next() NORIA_REQUIRES(mutex_);
  void issued(const Item& item, Verb giver);

  Mutex mutex_;
  Condition changed_;
  std::deque<Item> items_ NORIA_GUARDED_BY(mutex_);
  bool running_ NORIA_GUARDED_BY(mutex_) = false;
  bool closing_ NORIA_GUARDED_BY(mutex_) = false;
};

}  // namespace noria
