#include "comm/collect_lane.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "base/errors.h"
#include "base/mutex.h"

namespace noria {
namespace {

constexpr const char* kRemedy = "let all ranks call the same, as often and between the same passes: backward, step, "
                                "state_dict(), noria.save, loads, "
                                "noria.materialize, noria.unwrap; under update=\"backward\" the same modules too. "
                                "These processes cannot go on: start "
                                "again from a checkpoint";

constexpr std::size_t kNumbers = 5;
constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::min();

// Carries the result of an exchange to the thread that waits for it.
struct Answer {
  Mutex mutex;
  Condition changed;
  bool done NORIA_GUARDED_BY(mutex) = false;
  CollectLane::Met met NORIA_GUARDED_BY(mutex);
  std::exception_ptr error NORIA_GUARDED_BY(mutex);

  void give(CollectLane::Met found, std::exception_ptr failure) {
    const MutexLock lock(mutex);
    met = std::move(found);
    error = std::move(failure);
    done = true;
    changed.notify_all();
  }
  CollectLane::Met await() {
    const MutexLock lock(mutex);
    while (!done) changed.wait(mutex);
    if (error) std::rethrow_exception(error);
    return std::move(met);
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

Ticket CollectLane::submit(const OpLabel& label, Collective collective, std::vector<Ticket> waits,
                           RankPosition position) {
  const Ticket ticket = backend_->open(label, collective.received(shards_));
  enqueue(
      [this, label, ticket, collective = std::move(collective), waits = std::move(waits),
       position = std::move(position)] {
        run(label, collective, waits, position);
        backend_->give(ticket, collectives_->stream());
      },
      [this, ticket](std::exception_ptr error) { backend_->give_failed(ticket, std::move(error)); });
  return ticket;
}

void CollectLane::run(const OpLabel& label, Collective collective, const std::vector<Ticket>& waits,
                      const RankPosition& position) {
  for (const Ticket& wait : waits) thread_.await_issued(wait);
  Wanting wanting;
  if (!collective.empty()) {
    const Intent::Act act = label.verb == Verb::gather ? Intent::Act::gather : Intent::Act::reduce;
    const Intent own{act, position.phase, label.unit.value, position.version, position.num_broken};
    wanting = meet(own, label.op, position.unit_shards.get()).wanting;
  }
  backend_->wait(waits, collectives_->stream(), label);
  const bool by_all = std::find(wanting.begin(), wanting.end(), false) == wanting.end();
  for (const Gather& each : collective.gathers) {
    if (by_all) collectives_->gather(each);
    else collectives_->gather_some(each, wanting);
  }
  Reduction& reduction = collective.reduction;
  if (reduction.arrived) reduction.arrived_anywhere->add_all(collectives_->exchange(reduction.arrived->words()));
  if (reduction.all == nullptr) return;
  if (taken_.contains(label.unit.value)) {
    std::byte* const held = position.unit_shards->of[static_cast<std::size_t>(label.unit.value)]->gradient.to;
    reduction.add = {{reduction.all + (reduction.shard * shards_.rank).count, held, reduction.shard}};
  }
  if (by_all) collectives_->reduce(reduction);
  else collectives_->reduce_some(reduction);
}

CollectLane::Met CollectLane::exchange(std::vector<std::int64_t> numbers, SyncPoint point,
                                       const RankPosition& position) {
  const auto answer = std::make_shared<Answer>();
  enqueue(
      [this, answer, point, position, numbers = std::move(numbers)] {
        const Intent own{Intent::Act::exchange, Phase::forward, static_cast<std::int64_t>(numbers.size()),
                         static_cast<std::int64_t>(point), position.num_broken};
        Met met;
        met.has_assisted = meet(own, OpId(), position.unit_shards.get()).has_assisted;
        if (!numbers.empty()) met.numbers = collectives_->exchange(numbers);
        met.has_diverged = std::exchange(has_diverged_, false);
        if (point == SyncPoint::backward) {
          for (std::int64_t unit : std::exchange(taken_, {})) met.taken.emplace_back(static_cast<std::int32_t>(unit));
        }
        answer->give(std::move(met), nullptr);
      },
      [answer](std::exception_ptr error) { answer->give({}, std::move(error)); });
  return answer->await();
}

void CollectLane::forget_taken() {
  enqueue([this] { taken_.clear(); }, [](const std::exception_ptr&) {});
}

CollectLane::Agreed CollectLane::meet(const Intent& own, OpId op, const UnitShards* unit_shards) {
  Agreed agreed;
  while (true) {
    const std::vector<Intent> heads = tell(own);
    agree_on_broken(heads);
    const auto rank_of = [](const Intent& head) {  // smallest first
      const bool backwards = head.act != Intent::Act::gather || head.phase == Phase::backward;
      return std::tuple(head.act, backwards, backwards ? -head.subject : head.subject);
    };
    const auto first = std::min_element(heads.begin(), heads.end(),
                                        [&](const Intent& a, const Intent& b) { return rank_of(a) < rank_of(b); });
    const Intent& chosen = *first;
    const auto number = static_cast<std::size_t>(first - heads.begin());
    Wanting& wanting = agreed.wanting = {};
    for (std::size_t other = 0; other < heads.size(); ++other) {
      wanting.push_back(heads[other].is_same_op(chosen));
      if (wanting.back() && heads[other].version != chosen.version) refuse(heads, number, other);
    }
    const auto another = std::find(wanting.begin(), wanting.end(), false);
    if (another == wanting.end()) return agreed;
    if (chosen.act == Intent::Act::exchange) {
      refuse(heads, number, static_cast<std::size_t>(another - wanting.begin()));
    }
    has_diverged_ = true;
    const bool is_own = own.is_same_op(chosen);
    const UnitShard* shard =
        unit_shards == nullptr ? nullptr : unit_shards->of[static_cast<std::size_t>(chosen.subject)].get();
    agree_on_version(heads, chosen, is_own ? nullptr : shard);
    if (is_own) return agreed;
    assist(chosen, wanting, op, *shard);
    agreed.has_assisted = true;
  }
}

std::vector<CollectLane::Intent> CollectLane::tell(const Intent& own) {
  const std::vector<std::int64_t> all =
      collectives_->exchange({static_cast<std::int64_t>(own.act), static_cast<std::int64_t>(own.phase), own.subject,
                              own.version, own.num_broken});
  std::vector<Intent> heads;
  for (std::size_t i = 0; i < all.size(); i += kNumbers) {
    heads.push_back(
        {static_cast<Intent::Act>(all[i]), static_cast<Phase>(all[i + 1]), all[i + 2], all[i + 3], all[i + 4]});
  }
  return heads;
}

// Throws if a backward has raised on some ranks alone. What the other ranks reduced in it is of another batch than what
// comes next on the ranks where it raised.
void CollectLane::agree_on_broken(const std::vector<Intent>& heads) {
  for (std::size_t other = 0; other < heads.size(); ++other) {
    if (heads[other].num_broken == heads[0].num_broken) continue;
    throw UsageError("a backward that raises on all ranks or on none",
                     std::to_string(heads[other].num_broken) + " since wrap that have raised on rank " +
                         std::to_string(other) + ", and " + std::to_string(heads[0].num_broken) + " on rank 0",
                     "start again from a checkpoint, on all ranks; skip a batch before its backward, on any of them");
  }
}

// Only an assisting rank knows whether it has that version, so each rank says so before any begins.
void CollectLane::agree_on_version(const std::vector<Intent>& heads, const Intent& chosen, const UnitShard* shard) {
  const bool is_own = heads[static_cast<std::size_t>(rank_)].is_same_op(chosen);
  std::int64_t own = kNone;
  if (is_own) own = chosen.version;
  else if (shard != nullptr && (chosen.act == Intent::Act::gather || shard->gradient.to != nullptr))
    own = shard->version;
  const std::vector<std::int64_t> versions = collectives_->exchange({own});
  for (std::size_t other = 0; other < versions.size(); ++other) {
    if (versions[other] == chosen.version) continue;
    const auto first =
        std::find_if(heads.begin(), heads.end(), [&](const Intent& head) { return head.is_same_op(chosen); });
    if (versions[other] == kNone) refuse(heads, static_cast<std::size_t>(first - heads.begin()), other);
    throw UsageError("ranks that step together",
                     "rank " + std::to_string(first - heads.begin()) + " about to " + describe(chosen) +
                         ", which rank " + std::to_string(other) + " has " + describe_version(versions[other]),
                     kRemedy);
  }
}

void CollectLane::assist(const Intent& chosen, const Wanting& wanting, OpId op, const UnitShard& shard) {
  const bool is_gather = chosen.act == Intent::Act::gather;
  const UnitId unit(static_cast<std::int32_t>(chosen.subject));
  const std::vector<Ticket>& waits = is_gather ? shard.before_read : shard.before_write;
  for (const Ticket& wait : waits) thread_.await_issued(wait);
  backend_->wait(waits, collectives_->stream(), {op, Lane::collect, is_gather ? Verb::gather : Verb::reduce, unit});
  if (is_gather) {
    for (const ShardSend& each : shard.weights) collectives_->give(each, wanting);
    return;
  }
  ShardReceive taking = shard.gradient;
  if (!taken_.insert(chosen.subject).second) taking.add = {{Bytes{0}, taking.shard}};
  collectives_->take(taking);
}

void CollectLane::refuse(const std::vector<Intent>& heads, std::size_t first, std::size_t other) const {
  const auto [low, high] = std::minmax(first, other);
  const bool are_alike = describe(heads[low]) == describe(heads[high]);
  const auto count = [&](const Intent& head) {
    return are_alike ? ", and to exchange " + std::to_string(head.subject) + " numbers" : "";
  };
  throw UsageError("ranks that do the same",
                   "rank " + std::to_string(low) + " about to " + describe(heads[low]) + count(heads[low]) +
                       " and rank " + std::to_string(high) + " to " + describe(heads[high]) + count(heads[high]),
                   kRemedy);
}

std::string CollectLane::describe_version(std::int64_t version) {
  if (version == 0) return "as wrap left it";
  if (version < 0) return "as it was loaded after step " + std::to_string(-1 - version);
  return "as step " + std::to_string(version) + " left it";
}

std::string CollectLane::describe(const Intent& intent) const {
  if (intent.act == Intent::Act::exchange) {
    const bool ends_backward = static_cast<SyncPoint>(intent.version) == SyncPoint::backward;
    return ends_backward ? "end a backward"
                         : "do what all ranks do together (state_dict(), a save, a load, a norm, noria.materialize, "
                           "noria.unwrap, the first no_sync())";
  }
  const std::string verb = intent.act == Intent::Act::gather ? "gather" : "reduce";
  return verb + " \"" + names_.at(static_cast<std::size_t>(intent.subject)) + "\" " + describe_version(intent.version);
}

}  // namespace noria
