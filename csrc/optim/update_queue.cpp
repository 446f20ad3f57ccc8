#include "optim/update_queue.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <utility>

namespace noria {
namespace {

bool have_passed(const std::vector<Ticket>& waits) {
  return std::all_of(waits.begin(), waits.end(), [](const Ticket& wait) { return wait->passed(); });
}

}  // namespace

bool UpdateQueue::push(const Item& item) {
  // Copies the waits before the item is visible, because from then on the item belongs to the serving thread.
  const std::vector<Ticket> waits = item->waits;
  item->num_unissued = static_cast<int>(waits.size());
  for (const Ticket& wait : waits) item->newest_wait = std::max(item->newest_wait, wait->label.op);
  {
    const MutexLock lock(mutex_);
    if (closing_) return false;
    items_.push_back(item);
    changed_.notify_all();
  }
  // The lock is not held, because a ticket that is issued already calls back at once, on this thread.
  for (const Ticket& wait : waits) {
    wait->when_issued([self = shared_from_this(), item, giver = wait->label.verb] { self->issued(item, giver); });
  }
  return true;
}

void UpdateQueue::issued(const Item& item, Verb giver) {
  const MutexLock lock(mutex_);
  item->last_giver = giver;
  if (--item->num_unissued == 0) changed_.notify_all();
}

UpdateQueue::Item UpdateQueue::next() {
  auto chosen = items_.end();
  bool is_ready = false;
  for (auto it = items_.begin(); it != items_.end(); ++it) {
    if ((*it)->num_unissued > 0) continue;
    const bool passed = have_passed((*it)->waits);
    if (chosen != items_.end()) {
      if (is_ready && !passed) continue;
      const bool is_before =
          passed ? (*it)->priority < (*chosen)->priority : (*it)->newest_wait < (*chosen)->newest_wait;
      if (is_ready == passed && !is_before) continue;
    }
    chosen = it;
    is_ready = passed;
  }
  if (chosen == items_.end()) return nullptr;
  Item item = std::move(*chosen);
  items_.erase(chosen);
  return item;
}

bool UpdateQueue::recall(const Ticket& ticket) {
  Item item;
  {
    const MutexLock lock(mutex_);
    const auto found =
        std::find_if(items_.begin(), items_.end(), [&](const Item& each) { return each->ticket == ticket; });
    if (found == items_.end() || (*found)->is_recalled) return false;
    (*found)->is_recalled = true;
    (*found)->priority = std::numeric_limits<int>::min();
    if (!have_passed((*found)->waits)) return true;
    item = std::move(*found);  // then its ticket need not wait for the job that runs
    items_.erase(found);
    changed_.notify_all();
  }
  try {
    for (const Ticket& wait : std::exchange(item->waits, {})) wait->wait_passed();
    item->ticket->pass();
  } catch (...) {
    item->ticket->fail(std::current_exception());
  }
  return true;
}

bool UpdateQueue::holds(const Ticket& ticket) {
  const MutexLock lock(mutex_);
  return std::any_of(items_.begin(), items_.end(), [&](const Item& item) { return item->ticket == ticket; });
}

UpdateQueue::Taken UpdateQueue::take() {
  const MutexLock lock(mutex_);
  running_ = false;
  changed_.notify_all();
  Taken taken;
  if (!closing_) taken.item = next();
  taken.was_ready = taken.item != nullptr;
  while (!closing_ && !taken.item && !(taken.item = next())) changed_.wait(mutex_);
  running_ = taken.item != nullptr;
  return taken;
}

bool UpdateQueue::sleep_until(std::int64_t deadline_ns) {
  const std::chrono::steady_clock::time_point deadline{std::chrono::nanoseconds(deadline_ns)};
  const MutexLock lock(mutex_);
  if (std::chrono::steady_clock::now() >= deadline) return !closing_;  // see sleep_until_ns
  while (!closing_ && changed_.wait_until(mutex_, deadline)) {
  }
  return !closing_;
}

std::deque<UpdateQueue::Item> UpdateQueue::take_rest() {
  const MutexLock lock(mutex_);
  changed_.notify_all();
  return std::exchange(items_, {});
}

void UpdateQueue::close() {
  const MutexLock lock(mutex_);
  closing_ = true;
  changed_.notify_all();
}

void UpdateQueue::await_idle() {
  const MutexLock lock(mutex_);
  while (!items_.empty() || running_) changed_.wait(mutex_);
}

}  // namespace noria
