#include "comm/collect_lane.h"

#include <algorithm>
#include <future>
#include <limits>
#include <tuple>
#include <utility>

#include "base/errors.h"

namespace noria {
namespace {

constexpr const char* kRemedy = "let all ranks call the same, as often and between the same passes: backward, step, "
                                "state_dict(), noria.save, loads, "
                                "noria.materialize, noria.unwrap; under update=\"backward\" the same modules too. "
                                "These processes cannot go on: start "
                                "again from a checkpoint";

constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::min();

}  // namespace

CollectLane::CollectLane(std::shared_ptr<Backend> backend, std::shared_ptr<Collectives> collectives,
                         std::vector<std::string> names, bool assists)
    : backend_(std::move(backend)),
      collectives_(std::move(collectives)),
      rank_(collectives_->rank()),
      shards_(collectives_->shards()),
      thread_("collect") {
  if (assists) agreement_.emplace(collectives_, 1, std::move(names), kRemedy);
  else announcer_.emplace(collectives_, std::move(names));
}

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
  const MutexLock lock(order_);
  Agree agreed;
  if (!collective.empty()) {
    const Intent::Act act = label.verb == Verb::gather ? Intent::Act::gather : Intent::Act::reduce;
    const auto& arrived = collective.reduction.arrived;
    agreed = agree({act, position.phase, label.unit.value, position.version, position.num_broken},
                   arrived ? arrived->words() : std::vector<std::int64_t>(), label.op, position);
  }
  enqueue(
      [this, label, ticket, collective = std::move(collective), waits = std::move(waits),
       position = std::move(position), agreed = std::move(agreed)] {
        run(label, collective, waits, position, agreed);
        backend_->give(ticket, collectives_->stream());
      },
      [this, ticket](std::exception_ptr error) { backend_->give_failed(ticket, std::move(error)); });
  return ticket;
}

void CollectLane::run(const OpLabel& label, Collective collective, const std::vector<Ticket>& waits,
                      const RankPosition& position, const Agree& agreed) {
  for (const Ticket& wait : waits) thread_.await_issued(wait);
  const auto [wanting, has_assisted, numbers] = agreed ? agreed() : Agreed();
  backend_->wait(waits, collectives_->stream(), label);
  const bool by_all = std::find(wanting.begin(), wanting.end(), false) == wanting.end();
  for (const Gather& each : collective.gathers) {
    if (by_all) collectives_->gather(each);
    else collectives_->gather_some(each, wanting);
  }
  Reduction& reduction = collective.reduction;
  if (reduction.arrived) reduction.arrived_anywhere->add_all(numbers);
  if (reduction.all == nullptr) return;
  if (taken_.contains(label.unit.value)) {
    std::byte* const held = position.unit_shards->of[label.unit]->gradient.to;
    reduction.add = {{reduction.all + (reduction.shard * shards_.rank).count, held, reduction.shard}};
  }
  if (by_all) collectives_->reduce(reduction);
  else collectives_->reduce_some(reduction);
}

CollectLane::Met CollectLane::exchange(std::vector<std::int64_t> numbers, SyncPoint point,
                                       const RankPosition& position) {
  const Intent own{Intent::Act::exchange, Phase::forward, static_cast<std::int64_t>(numbers.size()),
                   static_cast<std::int64_t>(point), position.num_broken};
  const auto answer = std::make_shared<std::promise<Met>>();
  {
    const MutexLock lock(order_);
    enqueue(
        [this, answer, point, agreed = agree(own, std::move(numbers), OpId(), position)] {
          Agreed found = agreed();
          Met met{std::move(found.numbers), {}, std::exchange(has_diverged_, false), found.has_assisted};
          if (point == SyncPoint::backward) {
            for (std::int64_t unit : std::exchange(taken_, {})) met.taken.emplace_back(static_cast<std::int32_t>(unit));
          }
          answer->set_value(std::move(met));
        },
        [answer](std::exception_ptr error) { answer->set_exception(std::move(error)); });
  }
  return answer->get_future().get();
}

CollectLane::Agree CollectLane::agree(const Intent& own, std::vector<std::int64_t> numbers, OpId op,
                                      const RankPosition& position) {
  if (announcer_) {
    return [announced = announcer_->announce(own, std::move(numbers))] { return Agreed{{}, false, announced.get()}; };
  }
  return [this, own, op, numbers = std::move(numbers), unit_shards = position.unit_shards] {
    Agreed agreed = meet(own, op, unit_shards.get());
    if (!numbers.empty()) agreed.numbers = collectives_->exchange(numbers);
    return agreed;
  };
}

void CollectLane::forget_taken() {
  enqueue([this] { taken_.clear(); }, [](const std::exception_ptr&) {});
}

CollectLane::Agreed CollectLane::meet(const Intent& own, OpId op, const UnitShards* unit_shards) {
  Agreed agreed;
  while (true) {
    const std::vector<Intent> all = agreement_->tell({own}).front();
    Agreement::refuse_other_broken(all);
    const auto rank_of = [](const Intent& intent) {  // smallest first
      const bool backwards = intent.act != Intent::Act::gather || intent.phase == Phase::backward;
      return std::tuple(intent.act, backwards, backwards ? -intent.subject : intent.subject);
    };
    const auto first = std::min_element(all.begin(), all.end(),
                                        [&](const Intent& a, const Intent& b) { return rank_of(a) < rank_of(b); });
    const Intent& chosen = *first;
    const auto number = static_cast<std::size_t>(first - all.begin());
    Wanting& wanting = agreed.wanting = {};
    for (std::size_t other = 0; other < all.size(); ++other) {
      wanting.push_back(all[other].is_same_op(chosen));
      if (wanting.back() && all[other].version != chosen.version) agreement_->refuse(all, number, other);
    }
    const auto another = std::find(wanting.begin(), wanting.end(), false);
    if (another == wanting.end()) return agreed;
    if (chosen.act == Intent::Act::exchange) {
      agreement_->refuse(all, number, static_cast<std::size_t>(another - wanting.begin()));
    }
    has_diverged_ = true;
    const bool is_own = own.is_same_op(chosen);
    const UnitShard* shard =
        unit_shards == nullptr ? nullptr : unit_shards->of[UnitId(static_cast<std::int32_t>(chosen.subject))].get();
    agree_on_version(all, chosen, is_own ? nullptr : shard);
    if (is_own) return agreed;
    assist(chosen, wanting, op, *shard);
    agreed.has_assisted = true;
  }
}

// Only an assisting rank knows whether it has that version, so each rank says so before any begins.
void CollectLane::agree_on_version(const std::vector<Intent>& all, const Intent& chosen, const UnitShard* shard) {
  const bool is_own = all[static_cast<std::size_t>(rank_)].is_same_op(chosen);
  std::int64_t own = kNone;
  if (is_own) own = chosen.version;
  else if (shard != nullptr && (chosen.act == Intent::Act::gather || shard->gradient.to != nullptr))
    own = shard->version;
  const std::vector<std::int64_t> versions = collectives_->exchange({own});
  for (std::size_t other = 0; other < versions.size(); ++other) {
    if (versions[other] == chosen.version) continue;
    const auto first = static_cast<std::size_t>(
        std::find_if(all.begin(), all.end(), [&](const Intent& intent) { return intent.is_same_op(chosen); }) -
        all.begin());
    if (versions[other] == kNone) agreement_->refuse(all, first, other);
    agreement_->refuse_version(all, first, other, versions[other]);
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

}  // namespace noria
