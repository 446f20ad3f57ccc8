#include "plan/simulate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <optional>
#include <set>
#include <utility>

#include "base/errors.h"

namespace noria {
namespace {

// Less than this is left of an op that has ended; sums of floats miss by a little.
constexpr double kNothingUs = 1e-6;

class Simulation {
 public:
  Simulation(const std::vector<Op>& ops, const WaitList& waits, const Costs& costs, const std::vector<int>& priorities,
             const RingUse& ring)
      : ops_(ops),
        waits_(waits),
        costs_(costs),
        priorities_(priorities),
        ring_(ring),
        num_free_slots_(ring.num_slots),
        num_waits_(ops.size()),
        waiters_(ops.size()),
        start_us_(ops.size()),
        end_us_(ops.size()) {
    NORIA_INVARIANT(waits.waits.size() == ops.size(), "the list of waits is not of these ops");
    NORIA_INVARIANT(ring.changes.empty() || ring.changes.size() == ops.size(), "changes of a ring are by op");
    NORIA_INVARIANT(priorities.empty() || priorities.size() == ops.size(), "priorities are by op");
    for (std::size_t op = 0; op < ops.size(); ++op) queue(op);
  }

  std::vector<Span> run() {
    while (true) {
      while (begin_next()) {
      }
      if (!pass_time()) break;
    }
    const bool is_done = std::all_of(queues_.begin(), queues_.end(), [](const auto& queue) { return queue.empty(); });
    NORIA_INVARIANT(is_done, "a simulated op waits for ever for a slot of the ring");
    std::vector<Span> spans;
    for (std::size_t op = 0; op < ops_.size(); ++op) {
      if (ops_[op].verb != Verb::evict) spans.push_back(span_of(op));
    }
    return spans;
  }

 private:
  // What is left of an op: first its latency, then its bytes or its compute at full speed.
  struct Running {
    std::size_t op;
    double latency_us, work_us;
  };

  void queue(std::size_t op) {
    for (const std::int64_t wait : waits_.waits[op]) {
      NORIA_INVARIANT(wait >= 0 && wait < static_cast<std::int64_t>(op), "an op waits for one that is issued later");
      const auto giver = static_cast<std::size_t>(wait);
      if (ops_[giver].verb == Verb::evict) continue;
      ++num_waits_[op];
      waiters_[giver].push_back(op);
    }
    if (ops_[op].verb == Verb::evict) return;
    NORIA_INVARIANT(!is_pooled(op) || changes(op) != RingUse::Change::takes, "an update takes no slot of the ring");
    if (is_pooled(op)) {
      if (num_waits_[op] == 0) pool_.emplace(priorities_[op], op);
    } else {
      queues_.at(index(op)).push_back(op);
    }
  }

  // Updates with priorities. All other ops run in issue order.
  bool is_pooled(std::size_t op) const { return ops_[op].lane == Lane::update && !priorities_.empty(); }
  RingUse::Change changes(std::size_t op) const {
    return ring_.changes.empty() ? RingUse::Change::none : ring_.changes[op];
  }
  std::size_t index(std::size_t op) const { return static_cast<std::size_t>(ops_[op].lane); }

  /// Begins what may begin now. Returns true if an op that takes no time has ended, so that more may begin.
  bool begin_next() {
    bool has_ended = false;
    for (std::size_t lane = 0; lane < running_.size(); ++lane) {
      if (running_.at(lane)) continue;
      const std::optional<std::size_t> next = take(lane);
      if (!next) continue;
      start_us_[*next] = now_us_;
      const double all_us = duration_us(ops_[*next], costs_), latency_us = latency_us_of(ops_[*next], costs_);
      running_.at(lane) = Running{*next, latency_us, all_us - latency_us};
      has_ended = end_if_done(lane) || has_ended;
    }
    return has_ended;
  }

  std::optional<std::size_t> take(std::size_t lane) {
    if (lane == static_cast<std::size_t>(Lane::update) && !pool_.empty()) {
      const std::size_t op = pool_.begin()->second;
      pool_.erase(pool_.begin());
      return op;
    }
    std::deque<std::size_t>& queue = queues_.at(lane);
    if (queue.empty() || num_waits_[queue.front()] > 0) return std::nullopt;
    const std::size_t op = queue.front();
    if (changes(op) == RingUse::Change::takes) {
      if (num_free_slots_ == 0) return std::nullopt;
      --num_free_slots_;
    }
    queue.pop_front();
    return op;
  }

  /// Returns false if nothing runs.
  bool pass_time() {
    const std::array<double, kNumLanes> speed = speeds();
    std::optional<double> step_us;
    for (std::size_t lane = 0; lane < running_.size(); ++lane) {
      if (!running_.at(lane)) continue;
      const Running& each = *running_.at(lane);
      const double left_us = each.latency_us > 0 ? each.latency_us : each.work_us / speed.at(lane);
      step_us = step_us ? std::min(*step_us, left_us) : left_us;
    }
    if (!step_us) return false;
    now_us_ += *step_us;
    for (std::size_t lane = 0; lane < running_.size(); ++lane) {
      if (!running_.at(lane)) continue;
      Running& each = *running_.at(lane);
      if (each.latency_us > 0) each.latency_us -= *step_us;
      else each.work_us -= *step_us * speed.at(lane);
      if (each.latency_us < kNothingUs) each.latency_us = 0;
      end_if_done(lane);
    }
    return true;
  }

  bool end_if_done(std::size_t lane) {
    const Running& each = *running_.at(lane);
    if (each.latency_us > 0 || each.work_us > kNothingUs) return false;
    end_us_[each.op] = now_us_;
    if (changes(each.op) == RingUse::Change::gives) ++num_free_slots_;
    for (const std::size_t waiter : waiters_[each.op]) {
      if (--num_waits_[waiter] == 0 && is_pooled(waiter)) pool_.emplace(priorities_[waiter], waiter);
    }
    running_.at(lane).reset();
    return true;
  }

  /// Returns each lane's share of its full speed, as links and the host's memory allow now.
  std::array<double, kNumLanes> speeds() const {
    std::array<double, kNumLanes> share;
    share.fill(1.0);
    const auto gib_s = [&](Lane lane) {
      const auto& running = running_.at(static_cast<std::size_t>(lane));
      return running && running->latency_us <= 0 ? bandwidth_gib_s_of(ops_[running->op], costs_) : 0.0;
    };
    const double fetch = gib_s(Lane::fetch), drain = gib_s(Lane::drain), update = gib_s(Lane::update);
    double copies = 1.0, host = 1.0;
    if (fetch > 0 && drain > 0 && costs_.both_ways_gib_s > 0)
      copies = std::min(1.0, costs_.both_ways_gib_s / (fetch + drain));
    const double wanted = costs_.host_bytes_per_copied * copies * (fetch + drain) + update;
    if (costs_.host_gib_s > 0 && wanted > costs_.host_gib_s) host = costs_.host_gib_s / wanted;
    share.at(static_cast<std::size_t>(Lane::fetch)) = share.at(static_cast<std::size_t>(Lane::drain)) = copies * host;
    share.at(static_cast<std::size_t>(Lane::update)) = host;
    if (gib_s(Lane::read) > 0 && gib_s(Lane::read_weights) > 0) {  // from the same disks
      share.at(static_cast<std::size_t>(Lane::read)) = share.at(static_cast<std::size_t>(Lane::read_weights)) = 0.5;
    }
    return share;
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
  const RingUse& ring_;
  int num_free_slots_;
  std::vector<std::size_t> num_waits_;  // that have not ended
  std::vector<std::vector<std::size_t>> waiters_;
  std::vector<double> start_us_, end_us_;
  std::array<std::deque<std::size_t>, kNumLanes> queues_;
  std::set<std::pair<int, std::size_t>> pool_;  // updates that may run now, the next one first
  std::array<std::optional<Running>, kNumLanes> running_;
  double now_us_ = 0;
};

}  // namespace

std::vector<Span> simulate(const std::vector<Op>& ops, const WaitList& waits, const Costs& costs,
                           const std::vector<int>& priorities, const RingUse& ring) {
  return Simulation(ops, waits, costs, priorities, ring).run();
}

}  // namespace noria
