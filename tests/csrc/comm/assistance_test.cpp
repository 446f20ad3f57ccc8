// Ranks that visit different units: each gets whole units and its part of every sum, and none waits for ever.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "comm/collect_lane.h"
#include "device/host_backend.h"
#include "local_collectives.h"
#include "testing/slow_pace.h"

namespace noria {
namespace {

constexpr int kRanks = 3;
constexpr int kUnits = 5;
constexpr std::int64_t kCount = 8;  // floats in a shard
constexpr Bytes kShard{kCount * 4};

using Floats = std::vector<float>;

std::byte* bytes_of(Floats& floats) { return reinterpret_cast<std::byte*>(floats.data()); }
Bytes slice(int rank) { return kShard * rank; }

/// Weights of a shard. Small whole numbers: sums of them have no order.
float weight(int unit, int owner, std::int64_t version) {
  return static_cast<float>(100 * unit + 10 * owner + version);
}
/// What a rank brings to a sum, of each element.
float gradient(int rank, int unit, int visit) { return static_cast<float>(kRanks * (7 * rank + 3 * unit + visit + 1)); }

/// One rank's home, and the calls that an engine makes for it.
class Rank {
 public:
  Rank(const std::shared_ptr<LocalGroup>& group, int rank, const HostBackendOptions& options)
      : rank_(rank),
        backend_(std::make_shared<HostBackend>(options)),
        lane_(backend_, std::make_shared<LocalCollectives>(group, rank),
              std::vector<std::string>{"a", "b", "c", "d", "e"},
              /*assists=*/true) {
    for (int unit = 0; unit < kUnits; ++unit) {
      weights_[index(unit)].assign(kCount, weight(unit, rank, 0));
      held_[index(unit)].assign(kCount, -1.0F);
    }
  }
  ~Rank() {
    lane_.close();
    backend_->close();
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  void turn(Phase phase) { phase_ = phase; }
  CollectLane& lane() { return lane_; }

  void gather(int unit) {
    Floats& whole = memory_.emplace_back(kRanks * kCount, -7.0F);
    std::copy(weights_[index(unit)].begin(), weights_[index(unit)].end(), whole.begin() + rank_ * kCount);
    const Ticket ticket =
        lane_.submit(label(Verb::gather, unit), {{{bytes_of(whole), kShard}}, {}}, {}, position(unit));
    gathered_.push_back({&whole, unit, versions_[index(unit)], ticket});
  }
  void reduce(int unit, int visit) {
    Floats& whole = memory_.emplace_back(kRanks * kCount, gradient(rank_, unit, visit));
    Collective collective;
    collective.reduction.all = bytes_of(whole);
    collective.reduction.shard = kShard;
    std::byte* const own = bytes_of(whole) + slice(rank_).count;
    if (reduced_[index(unit)]) collective.reduction.add.push_back({own, bytes_of(held_[index(unit)]), kShard});
    std::vector<Ticket> waits;
    if (reduced_[index(unit)]) waits = before_write_[index(unit)];
    const Ticket reduced =
        lane_.submit(label(Verb::reduce, unit), std::move(collective), std::move(waits), position(unit));
    reduced_[index(unit)] = true;
    const OpLabel drain{OpId(next_op_++), Lane::drain, Verb::drain, UnitId(unit)};
    before_write_[index(unit)] = {
        backend_->submit(drain, {{{bytes_of(held_[index(unit)]), own, kShard}}, {}}, {reduced})};
  }
  void break_backward() { ++num_broken_; }
  void end_backward() {
    const auto met = lane_.exchange({rank_}, SyncPoint::backward, position(0));
    EXPECT_EQ(met.numbers, (std::vector<std::int64_t>{0, 1, 2}));
    for (UnitId unit : met.taken) {
      EXPECT_TRUE(taken_.insert(unit.value).second);
      reduced_[index(unit.value)] = true;
    }
    for (const auto& waits : before_write_) {
      for (const Ticket& wait : waits) wait->wait_passed();
    }
    for (const auto& [whole, unit, version, ticket] : gathered_) {
      ticket->wait_passed();
      for (int owner = 0; owner < kRanks; ++owner) {
        for (std::int64_t i = 0; i < kCount; ++i) {
          EXPECT_EQ((*whole)[static_cast<std::size_t>(owner * kCount + i)], weight(unit, owner, version));
        }
      }
    }
    num_gathers_ += gathered_.size();
    gathered_.clear();
    memory_.clear();
  }
  void step(int number, const std::array<float, kUnits>& expected) {
    for (int unit = 0; unit < kUnits; ++unit) {
      const bool is_any = expected[index(unit)] != 0.0F;
      EXPECT_EQ(reduced_[index(unit)], is_any) << unit;
      if (!is_any) continue;
      for (float found : held_[index(unit)]) EXPECT_EQ(found, expected[index(unit)]) << "unit " << unit;
      std::fill(weights_[index(unit)].begin(), weights_[index(unit)].end(), weight(unit, rank_, number + 1));
      versions_[index(unit)] = number + 1;
    }
    reduced_ = {};
    taken_.clear();
  }
  void load(int unit) { versions_[index(unit)] = -1; }
  std::size_t num_gathers() const { return num_gathers_; }

 private:
  struct Gathered {
    Floats* whole;
    int unit;
    std::int64_t version;
    Ticket ticket;
  };

  static std::size_t index(int unit) { return static_cast<std::size_t>(unit); }
  OpLabel label(Verb verb, int unit) { return {OpId(next_op_++), Lane::collect, verb, UnitId(unit)}; }
  RankPosition position(int unit) { return {phase_, versions_[index(unit)], unit_shards(), num_broken_}; }
  std::shared_ptr<const UnitShards> unit_shards() {
    std::vector<std::shared_ptr<const UnitShard>> of;
    for (int unit = 0; unit < kUnits; ++unit) {
      auto share = std::make_shared<UnitShard>();
      share->version = versions_[index(unit)];
      share->weights.push_back({{{bytes_of(weights_[index(unit)]), kShard}}, kShard, bytes_of(scratch_)});
      share->gradient = {bytes_of(held_[index(unit)]), kShard, ElementType::fp32, bytes_of(scratch_), nullptr, {}};
      if (reduced_[index(unit)]) share->gradient.add.emplace_back(Bytes{0}, kShard);
      share->before_write = before_write_[index(unit)];
      of.push_back(std::move(share));
    }
    return std::make_shared<UnitShards>(UnitShards{UnitMap(std::move(of))});
  }

  const int rank_;
  const std::shared_ptr<HostBackend> backend_;
  std::array<Floats, kUnits> weights_, held_;
  Floats scratch_ = Floats(kCount);
  std::array<std::int64_t, kUnits> versions_{};
  std::array<bool, kUnits> reduced_{};
  std::set<int> taken_;
  std::array<std::vector<Ticket>, kUnits> before_write_;
  std::deque<Floats> memory_;
  std::vector<Gathered> gathered_;
  std::size_t num_gathers_ = 0;
  std::int64_t next_op_ = 0;
  Phase phase_ = Phase::forward;
  std::int64_t num_broken_ = 0;
  CollectLane lane_;
};

/// What one rank visits in one step.
struct Visits {
  std::vector<int> forward, gathers, reduces;
};

Visits draw(std::mt19937& random) {
  const auto some = [&] {
    std::vector<int> drawn;
    for (int unit = 0; unit < kUnits; ++unit) {
      if (random() % 3 != 0) drawn.push_back(unit);
    }
    if (random() % 4 == 0) std::shuffle(drawn.begin(), drawn.end(), random);
    if (random() % 3 == 0) drawn.push_back(static_cast<int>(random() % kUnits));
    return drawn;
  };
  Visits visits{some(), some(), some()};
  std::reverse(visits.gathers.begin(), visits.gathers.end());
  std::reverse(visits.reduces.begin(), visits.reduces.end());
  return visits;
}

void run(Rank& rank, int number, const Visits& visits, const std::array<float, kUnits>& expected) {
  rank.turn(Phase::forward);
  for (int unit : visits.forward) rank.gather(unit);
  rank.turn(Phase::backward);
  for (std::size_t i = 0; i < std::max(visits.gathers.size(), visits.reduces.size()); ++i) {
    if (i < visits.gathers.size()) rank.gather(visits.gathers[i]);
    if (i < visits.reduces.size()) rank.reduce(visits.reduces[i], static_cast<int>(i));
  }
  rank.end_backward();
  rank.step(number, expected);
}

TEST(Assistance, ranks_that_visit_different_units_get_all_weights_and_all_sums) {
  constexpr int kPrograms = 60;
  constexpr int kSteps = 3;
  std::size_t num_gathers = 0;
  for (unsigned seed = 0; seed < kPrograms; ++seed) {
    std::mt19937 random(seed);
    std::array<std::array<Visits, kRanks>, kSteps> program;
    std::array<std::array<float, kUnits>, kSteps> expected{};
    for (int number = 0; number < kSteps; ++number) {
      for (int rank = 0; rank < kRanks; ++rank) {
        Visits& visits = program[static_cast<std::size_t>(number)][static_cast<std::size_t>(rank)] = draw(random);
        for (std::size_t i = 0; i < visits.reduces.size(); ++i) {
          const int unit = visits.reduces[i];
          expected[static_cast<std::size_t>(number)][static_cast<std::size_t>(unit)] +=
              gradient(rank, unit, static_cast<int>(i)) / kRanks;
        }
      }
    }
    Hostility hostility;
    hostility.seed = seed + 1;
    hostility.max_delay_us = seed % 2 == 0 ? 0 : 200;
    if (seed % 3 == 0) hostility.hold_us[Verb::drain] = 500;
    const auto group = std::make_shared<LocalGroup>(kRanks);
    std::deque<Rank> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back(group, rank, HostBackendOptions{Bytes{1 << 20}, slow(hostility)});
    }
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        for (std::size_t number = 0; number < kSteps; ++number) {
          run(ranks[rank], static_cast<int>(number), program[number][rank], expected[number]);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Rank& rank : ranks) num_gathers += rank.num_gathers();
    group->leave();
    if (testing::Test::HasFailure()) FAIL() << "seed " << seed;
  }
  EXPECT_GT(num_gathers, 1000U);
}

std::string failure_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

/// What each rank is told when all do `act`, which is given the rank, and then end a backward.
std::array<std::string, kRanks> told(const std::function<void(Rank&, int)>& act) {
  const auto group = std::make_shared<LocalGroup>(kRanks);
  std::deque<Rank> ranks;
  for (int rank = 0; rank < kRanks; ++rank) ranks.emplace_back(group, rank, HostBackendOptions{Bytes{1 << 20}});
  std::array<std::string, kRanks> said;
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      said[rank] = failure_of([&] {
        act(ranks[rank], static_cast<int>(rank));
        ranks[rank].end_backward();
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  group->leave();
  return said;
}

TEST(Assistance, different_versions_of_a_unit_raise_on_all_ranks) {
  for (const bool is_assisted : {true, false}) {
    const auto said = told([&](Rank& rank, int number) {
      if (number == 2) rank.load(1);
      if (number == 0 || !is_assisted) rank.gather(1);
    });
    for (const std::string& each : said) {
      EXPECT_NE(each.find("gather \"b\" as wrap left it"), std::string::npos) << each;
      EXPECT_NE(each.find("as it was loaded after step 0"), std::string::npos) << each;
    }
  }
}

TEST(Assistance, a_backward_that_has_raised_on_one_rank_alone_raises_on_all) {
  const auto said = told([&](Rank& rank, int number) {
    if (number == 2) rank.break_backward();
    if (number == 0) rank.gather(1);
  });
  for (const std::string& each : said) {
    EXPECT_NE(each.find("1 since wrap that have raised on rank 2, and 0 on rank 0"), std::string::npos) << each;
  }
}

TEST(Assistance, exchanges_that_differ_raise_on_all) {
  for (const bool by_count : {true, false}) {
    const auto said = told([&](Rank& rank, int number) {
      if (number != 1) return;
      if (by_count) rank.lane().exchange({1, 2}, SyncPoint::backward);
      else rank.lane().exchange({1}, SyncPoint::other);
    });
    for (const std::string& each : said) {
      EXPECT_NE(each.find(by_count ? "exchange 2 numbers" : "do what all ranks do together"), std::string::npos)
          << each;
      EXPECT_NE(each.find("end a backward"), std::string::npos) << each;
    }
  }
}

}  // namespace
}  // namespace noria
