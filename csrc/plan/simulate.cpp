#include "plan/simulate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "base/errors.h"

namespace noria {
namespace {

// An update that the pool may run next.
struct Next {
  std::size_t op;
  double ready_us;
  int priority;

  bool comes_before(const Next& other, double now) const {
    const bool is_ready = ready_us <= now, is_other_ready = other.ready_us <= now;
    if (is_ready != is_other_ready) return is_ready;
    return is_ready ? priority < other.priority : ready_us < other.ready_us;
  }
};

class Simulation {
 public:
  Simulation(const std::vector<Op>& ops, const WaitList& waits, const Costs& costs, const std::vector<int>& priorities)
      : ops_(ops),
        waits_(waits),
        costs_(costs),
        priorities_(priorities),
        start_us_(ops.size()),
        end_us_(ops.size()) {
    NORIA_INVARIANT(waits.waits.size() == ops.size(), "the list of waits is not of these ops");
    NORIA_INVARIANT(priorities.empty() || priorities.size() == ops.size(), "priorities are by op");
  }

  std::vector<Span> run() {
    for (std::size_t i = 0; i < ops_.size(); ++i) {
      if (ops_[i].verb == Verb::evict) continue;
      if (ops_[i].lane == Lane::update) pool_.push_back(i);
      else begin(i, ready_us(i));
    }
    while (!pool_.empty()) run_next_update();
    std::vector<Span> spans;
    for (std::size_t i = 0; i < ops_.size(); ++i) {
      if (ops_[i].verb != Verb::evict) spans.push_back(span_of(i));
    }
    return spans;
  }

 private:
  /// Returns when the waits of this op have ended. Runs updates until that is known.
  double ready_us(std::size_t op) {
    double ready = 0.0;
    for (const std::int64_t wait : waits_.waits[op]) {
      NORIA_INVARIANT(wait >= 0 && wait < static_cast<std::int64_t>(op), "an op waits for one that is issued later");
      const auto giver = static_cast<std::size_t>(wait);
      while (is_pending(wait)) run_next_update();
      ready = std::max(ready, end_us_[giver]);
    }
    return ready;
  }

  void begin(std::size_t op, double ready) {
    double& free_us = free_us_.at(static_cast<std::size_t>(ops_[op].lane));
    start_us_[op] = std::max(free_us, ready);
    end_us_[op] = free_us = start_us_[op] + duration_us(ops_[op], costs_);
  }

  bool is_pending(std::int64_t op) const {
    return std::find(pool_.begin(), pool_.end(), static_cast<std::size_t>(op)) != pool_.end();
  }

  void run_next_update() {
    const double now = free_us_.at(static_cast<std::size_t>(Lane::update));
    std::optional<Next> best;
    for (const std::size_t op : pool_) {
      const std::vector<std::int64_t>& waits = waits_.waits[op];
      if (std::any_of(waits.begin(), waits.end(), [&](std::int64_t wait) { return is_pending(wait); })) continue;
      const Next next{op, ready_us(op), priorities_.empty() ? 0 : priorities_[op]};
      if (!best || next.comes_before(*best, now)) best = next;
      if (priorities_.empty()) break;
    }
    std::erase(pool_, best->op);
    begin(best->op, best->ready_us);
  }

  Span span_of(std::size_t i) const {
    const Op& op = ops_[i];
    Span span;
    for (const std::int64_t wait : waits_.waits[i]) span.waits.push_back(ops_[static_cast<std::size_t>(wait)].id);
    span.op = op.id;
    span.lane = op.lane;
    span.verb = op.verb;
    span.unit = op.unit;
    span.start_us = std::llround(start_us_[i]);
    span.end_us = std::llround(end_us_[i]);
    span.bytes = op.bytes;
    return span;
  }

  const std::vector<Op>& ops_;
  const WaitList& waits_;
  const Costs& costs_;
  const std::vector<int>& priorities_;
  std::vector<double> start_us_, end_us_;
  std::array<double, kNumLanes> free_us_{};
  std::vector<std::size_t> pool_;  // updates that are issued and have not run, in issue order
};

}  // namespace

std::vector<Span> simulate(const std::vector<Op>& ops, const WaitList& waits, const Costs& costs,
                           const std::vector<int>& priorities) {
  return Simulation(ops, waits, costs, priorities).run();
}

}  // namespace noria
