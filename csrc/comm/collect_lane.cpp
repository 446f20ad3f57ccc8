#include "comm/collect_lane.h"

#include <array>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

#include "base/errors.h"

namespace noria {
namespace {

// In place of a verb: numbers are exchanged.
constexpr std::int64_t kExchange = -1;

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
      thread_("collect") {}

Ticket CollectLane::submit(const OpLabel& label, Collective collective, std::vector<Ticket> waits) {
  const Ticket ticket = backend_->open(label);
  thread_.enqueue({[this, label, ticket, collective = std::move(collective), waits = std::move(waits)] {
                     try {
                       run(label, collective, waits);
                       backend_->give(ticket, collectives_->stream());
                     } catch (...) {
                       if (!failure_) failure_ = std::current_exception();
                       backend_->give_failed(ticket, std::current_exception());
                     }
                   },
                   [this, ticket](std::exception_ptr error) { backend_->give_failed(ticket, std::move(error)); }});
  return ticket;
}

void CollectLane::run(const OpLabel& label, const Collective& collective, const std::vector<Ticket>& waits) {
  if (failure_) std::rethrow_exception(failure_);
  for (const Ticket& wait : waits) thread_.await_issued(wait);
  agree(label);
  backend_->wait(waits, collectives_->stream(), label);
  for (const Gather& each : collective.gathers) collectives_->gather(each);
  if (collective.reduction.all != nullptr) collectives_->reduce(collective.reduction);
}

std::vector<std::int64_t> CollectLane::exchange(std::vector<std::int64_t> numbers) {
  const auto answer = std::make_shared<Answer>();
  thread_.enqueue({[this, answer, numbers = std::move(numbers)] {
                     try {
                       if (failure_) std::rethrow_exception(failure_);
                       OpLabel label;
                       label.unit = UnitId(static_cast<std::int32_t>(numbers.size()));
                       agree(label);
                       answer->give(collectives_->exchange(numbers), nullptr);
                     } catch (...) {
                       if (!failure_) failure_ = std::current_exception();
                       answer->give({}, std::current_exception());
                     }
                   },
                   [answer](std::exception_ptr error) { answer->give({}, std::move(error)); }});
  return answer->await();
}

void CollectLane::agree(const OpLabel& label) {
  const std::int64_t verb = label.lane == Lane::collect ? static_cast<std::int64_t>(label.verb) : kExchange;
  constexpr std::size_t kNumbers = 2;
  const std::array<std::int64_t, kNumbers> own{verb, label.unit.value};
  const std::vector<std::int64_t> all = collectives_->exchange({own.begin(), own.end()});
  for (std::size_t other = 0; other < static_cast<std::size_t>(size_); ++other) {
    const std::int64_t* its = all.data() + kNumbers * other;
    if (its[0] == own[0] && its[1] == own[1]) continue;
    throw UsageError("ranks that do the same",
                     "rank " + std::to_string(rank_) + " about to " + describe(own[0], own[1]) + " and rank " +
                         std::to_string(other) + " to " + describe(its[0], its[1]),
                     kRemedy);
  }
}

std::string CollectLane::describe(std::int64_t verb, std::int64_t unit) const {
  if (verb == kExchange) return "exchange " + std::to_string(unit) + " numbers (in step(), or at the end of a pass)";
  const std::string name = unit >= 0 && unit < static_cast<std::int64_t>(names_.size())
                               ? "\"" + names_[static_cast<std::size_t>(unit)] + "\""
                               : "unit " + std::to_string(unit);
  return std::string(to_string(static_cast<Verb>(verb))) + " " + name;
}

}  // namespace noria
