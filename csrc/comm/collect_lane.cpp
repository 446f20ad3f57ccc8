#include "comm/collect_lane.h"

#include <condition_variable>
#include <mutex>
#include <utility>

#include "base/errors.h"

namespace noria {
namespace {

constexpr const char* kRemedy =
    "let every rank run the same modules in the same order, and step as often; a rank without data takes part with a "
    "batch of zeros";

// To whoever waits for numbers.
struct Answer {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::vector<std::int64_t> numbers;
  std::exception_ptr error;

  void give(std::vector<std::int64_t> found, std::exception_ptr failure) {
    const std::lock_guard lock(mutex);
    numbers = std::move(found);
    error = std::move(failure);
    done = true;
    changed.notify_all();
  }
  std::vector<std::int64_t> await() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return done; });
    if (error) std::rethrow_exception(error);
    return std::move(numbers);
  }
};

}  // namespace

CollectLane::CollectLane(std::shared_ptr<Backend> backend, std::shared_ptr<Collectives> collectives,
                         std::vector<std::string> names)
    : backend_(std::move(backend)),
      collectives_(std::move(collectives)),
      names_(std::move(names)),
      rank_(collectives_->rank()),
      size_(collectives_->size()),
      shards_(collectives_->shards()),
      thread_("collect") {}

void CollectLane::enqueue(std::function<void()> act, const Failed& failed) {
  thread_.enqueue({[this, act = std::move(act), failed] {
                     try {
                       if (failure_) std::rethrow_exception(failure_);
                       act();
                     } catch (...) {
                       if (!failure_) failure_ = std::current_exception();
                       failed(std::current_exception());
                     }
                   },
                   failed});
}

Ticket CollectLane::submit(const OpLabel& label, Collective collective, std::vector<Ticket> waits) {
  const Ticket ticket = backend_->open(label, collective.received(shards_));
  enqueue(
      [this, label, ticket, collective = std::move(collective), waits = std::move(waits)] {
        for (const Ticket& wait : waits) thread_.await_issued(wait);
        agree({label.verb == Verb::gather ? Intent::Act::gather : Intent::Act::reduce, label.unit.value});
        backend_->wait(waits, collectives_->stream(), label);
        for (const Gather& each : collective.gathers) collectives_->gather(each);
        const Reduction& reduction = collective.reduction;
        if (reduction.arrived) reduction.arrived_anywhere->add_all(collectives_->exchange(reduction.arrived->words()));
        if (reduction.all != nullptr) collectives_->reduce(reduction);
        backend_->give(ticket, collectives_->stream());
      },
      [this, ticket](std::exception_ptr error) { backend_->give_failed(ticket, std::move(error)); });
  return ticket;
}

std::vector<std::int64_t> CollectLane::exchange(std::vector<std::int64_t> numbers) {
  const auto answer = std::make_shared<Answer>();
  enqueue(
      [this, answer, numbers = std::move(numbers)] {
        agree({Intent::Act::exchange, static_cast<std::int64_t>(numbers.size())});
        answer->give(collectives_->exchange(numbers), nullptr);
      },
      [answer](std::exception_ptr error) { answer->give({}, std::move(error)); });
  return answer->await();
}

void CollectLane::agree(const Intent& own) {
  const std::vector<std::int64_t> all = collectives_->exchange({static_cast<std::int64_t>(own.act), own.subject});
  for (std::size_t other = 0; other < static_cast<std::size_t>(size_); ++other) {
    const Intent its{static_cast<Intent::Act>(all[2 * other]), all[2 * other + 1]};
    if (its == own) continue;
    throw UsageError("ranks that do the same",
                     "rank " + std::to_string(rank_) + " about to " + describe(own) + " and rank " +
                         std::to_string(other) + " to " + describe(its),
                     kRemedy);
  }
}

std::string CollectLane::describe(const Intent& intent) const {
  const auto index = static_cast<std::size_t>(intent.subject);
  switch (intent.act) {
  case Intent::Act::gather:
    return "gather \"" + names_.at(index) + "\"";
  case Intent::Act::reduce:
    return "reduce \"" + names_.at(index) + "\"";
  case Intent::Act::exchange:
    break;
  }
  return "exchange " + std::to_string(intent.subject) + " numbers, as at the end of a backward or in step()";
}

}  // namespace noria
