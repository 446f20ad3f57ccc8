#include "comm/announcer.h"

#include <algorithm>
#include <utility>

namespace noria {
namespace {

constexpr std::size_t kMost = 8;  // ops in one exchange: a message of 328 bytes
constexpr const char* kRemedy =
    "let all ranks run the same modules and call the same, in the same order: backward, step, state_dict(), "
    "noria.save, loads, noria.materialize, noria.unwrap. If ranks run different modules, pass "
    "find_unused_parameters=True to noria.wrap. These processes cannot go on: start again from a checkpoint";

}  // namespace

Announcer::Announcer(std::shared_ptr<Collectives> collectives, std::vector<std::string> names)
    : collectives_(collectives),
      agreement_(std::move(collectives), kMost, std::move(names), kRemedy),
      thread_("announce") {}

std::shared_future<Announcer::Numbers> Announcer::announce(const Intent& intent, Numbers numbers) {
  auto announced = std::make_shared<Announced>(Announced{intent, std::move(numbers), {}});
  std::shared_future<Numbers> agreed = announced->agreed.get_future().share();
  {
    const MutexLock lock(mutex_);
    waiting_.push_back(std::move(announced));
  }
  thread_.enqueue({[this] { agree_on_all(); }, [this](const std::exception_ptr& error) { fail_all(error); }});
  return agreed;
}

// Ranks need not have announced equally many ops: they agree on what all have announced, and tell the rest again.
void Announcer::agree_on_all() {
  try {
    if (failure_) std::rethrow_exception(failure_);
    for (std::vector<Intent> own = intents(); !own.empty(); own = intents()) {
      for (const std::vector<Intent>& all : agreement_.tell(own)) {
        Agreement::refuse_other_broken(all);
        agreement_.refuse_other_ops(all);
        settle_first();
      }
    }
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
    fail_all(failure_);
  }
}

std::vector<Intent> Announcer::intents() {
  const MutexLock lock(mutex_);
  std::vector<Intent> first;
  for (const auto& each : waiting_) {
    if (first.size() == kMost) break;
    first.push_back(each->intent);
  }
  return first;
}

void Announcer::settle_first() {
  std::shared_ptr<Announced> announced;
  {
    const MutexLock lock(mutex_);
    if (waiting_.empty()) return;  // failed meanwhile, because the announcer is being closed
    announced = std::move(waiting_.front());
    waiting_.pop_front();
  }
  try {
    Numbers found;
    if (!announced->numbers.empty()) found = collectives_->exchange(announced->numbers);
    announced->agreed.set_value(std::move(found));
  } catch (...) {
    announced->agreed.set_exception(std::current_exception());
    throw;
  }
}

void Announcer::fail_all(const std::exception_ptr& error) {
  std::deque<std::shared_ptr<Announced>> failed;
  {
    const MutexLock lock(mutex_);
    failed.swap(waiting_);
  }
  for (const auto& each : failed) each->agreed.set_exception(error);
}

}  // namespace noria
