#include "device/update_time.h"

#include <algorithm>

#include "device/timing.h"

namespace noria {

void UpdateTime::Hidden::count(const Work& visit, const Work& update) {
  const std::int64_t start_ns = std::max({visit.start_ns, update.start_ns, since_ns});
  const std::int64_t both_ns = std::max<std::int64_t>(0, std::min(visit.end_ns, update.end_ns) - start_ns);
  (visit.verb == Verb::forward ? forward_ns : backward_ns) += both_ns;
}

void UpdateTime::worked(Lane lane, Verb verb, std::int64_t start_ns, std::int64_t end_ns) {
  const MutexLock lock(mutex_);
  const Work work{start_ns, end_ns, verb};
  const bool is_update = lane == Lane::update;
  if (is_update) {
    running_.reset();
    for (const Work& visit : visits_) hidden_.count(visit, work);
  } else if (lane == Lane::compute && (verb == Verb::forward || verb == Verb::backward)) {
    for (const Work& update : updates_) hidden_.count(work, update);
  } else {
    return;
  }
  auto& own = is_update ? updates_ : visits_;
  auto& others = is_update ? visits_ : updates_;
  own.push_back(work);
  if (own.size() > kMostKept) own.pop_front();
  // Later work of this lane starts after this one's end, so it cannot overlap with what ended before.
  while (!others.empty() && others.front().end_ns <= end_ns) others.pop_front();
}

void UpdateTime::works(std::int64_t start_ns, std::int64_t due_ns) {
  const MutexLock lock(mutex_);
  running_ = Work{start_ns, due_ns, Verb::update};
}

void UpdateTime::stopped() {
  const MutexLock lock(mutex_);
  running_.reset();
}

void UpdateTime::begin_counting(std::int64_t since_ns) {
  const MutexLock lock(mutex_);
  hidden_ = {since_ns, 0, 0};
}

UpdateTime::Behind UpdateTime::behind() const {
  const MutexLock lock(mutex_);
  Hidden now = hidden_;
  if (running_) {
    Work update = *running_;
    update.end_ns = std::min(update.end_ns, now_ns());
    for (const Work& visit : visits_) now.count(visit, update);
  }
  return {now.forward_ns / 1000, now.backward_ns / 1000};
}

}  // namespace noria
