#include "comm/collect_lane.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

#include "device/host_backend.h"
#include "local_collectives.h"

namespace noria {
namespace {

constexpr int kRanks = 3;
constexpr std::int64_t kShard = 64;

struct Rank {
  std::shared_ptr<HostBackend> backend;
  std::unique_ptr<CollectLane> lane;
  std::vector<float> memory = std::vector<float>(kRanks * kShard, -1.0F);

  std::byte* bytes() { return reinterpret_cast<std::byte*>(memory.data()); }
};

/// The parameter: whether ranks may run different modules.
class CollectLaneTest : public testing::TestWithParam<bool> {
 protected:
  CollectLaneTest() {
    for (int rank = 0; rank < kRanks; ++rank) {
      Rank& made = ranks_[static_cast<std::size_t>(rank)];
      made.backend = std::make_shared<HostBackend>(HostBackendOptions{Bytes{1 << 20}});
      made.lane = std::make_unique<CollectLane>(made.backend, std::make_shared<LocalCollectives>(group_, rank),
                                                std::vector<std::string>{"head", "tail"}, GetParam());
      for (std::int64_t i = 0; i < kShard; ++i) made.memory[at(rank, i)] = value(rank, i);
    }
  }
  ~CollectLaneTest() override {
    group_->leave();
    for (Rank& rank : ranks_) rank.lane->close();
  }

  static std::size_t at(int rank, std::int64_t i) { return static_cast<std::size_t>(rank * kShard + i); }
  static float value(int rank, std::int64_t i) { return static_cast<float>(1000 * rank + i); }

  OpLabel label(Verb verb, std::int32_t unit) { return {OpId(next_op_++), Lane::collect, verb, UnitId(unit)}; }
  Collective gather(Rank& rank) { return {{{rank.bytes(), Bytes{kShard * 4}}}, {}}; }
  static std::string failure_of(const Ticket& ticket) {
    try {
      ticket->wait_passed();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }

  const std::shared_ptr<LocalGroup> group_ = std::make_shared<LocalGroup>(kRanks);
  std::array<Rank, kRanks> ranks_;
  std::int64_t next_op_ = 0;
};

TEST_P(CollectLaneTest, gathered_shards_are_those_of_all_ranks) {
  std::vector<Ticket> tickets;
  for (Rank& rank : ranks_) tickets.push_back(rank.lane->submit(label(Verb::gather, 0), gather(rank), {}));
  for (const Ticket& ticket : tickets) ticket->wait_passed();
  for (Rank& rank : ranks_) {
    for (int other = 0; other < kRanks; ++other) {
      for (std::int64_t i = 0; i < kShard; ++i) EXPECT_EQ(rank.memory[at(other, i)], value(other, i));
    }
  }
}

TEST_P(CollectLaneTest, a_reduction_is_cleared_first_and_added_to_last) {
  std::vector<float> onto(kShard, 0.5F);
  std::vector<Ticket> tickets;
  for (Rank& rank : ranks_) {
    rank.memory.assign(rank.memory.size(), 3.0F);
    Collective collective;
    collective.reduction.all = rank.bytes();
    collective.reduction.shard = Bytes{kShard * 4};
    collective.reduction.add.push_back({rank.bytes() + (&rank - ranks_.data()) * kShard * 4,
                                        reinterpret_cast<const std::byte*>(onto.data()), Bytes{kShard * 4}});
    for (int other = 0; other < kRanks; other += 2) {
      collective.reduction.zero.emplace_back(rank.bytes() + 4 * at(other, 0), Bytes{kShard * 4});
    }
    tickets.push_back(rank.lane->submit(label(Verb::reduce, 0), std::move(collective), {}));
  }
  for (const Ticket& ticket : tickets) ticket->wait_passed();
  for (int rank = 0; rank < kRanks; ++rank) {
    const float expected = 0.5F + (rank % 2 == 0 ? 0.0F : 3.0F);
    for (std::int64_t i = 0; i < kShard; ++i)
      EXPECT_EQ(ranks_[static_cast<std::size_t>(rank)].memory[at(rank, i)], expected);
  }
}

TEST_P(CollectLaneTest, an_op_runs_after_what_it_waits_for) {
  std::array<Ticket, kRanks> givers;
  std::vector<Ticket> tickets;
  for (std::size_t i = 0; i < kRanks; ++i) {
    givers[i] = ranks_[i].backend->open({OpId(next_op_++), Lane::compute, Verb::forward, UnitId(0)}, {});
    tickets.push_back(ranks_[i].lane->submit(label(Verb::gather, 0), gather(ranks_[i]), {givers[i]}));
  }
  for (std::size_t i = 0; i < kRanks; ++i) {
    EXPECT_FALSE(tickets[i]->passed());
    ranks_[i].memory[at(static_cast<int>(i), 0)] = 77.0F;
    ranks_[i].backend->give(givers[i], Stream());
  }
  for (const Ticket& ticket : tickets) ticket->wait_passed();
  for (Rank& rank : ranks_) {
    for (int other = 0; other < kRanks; ++other) EXPECT_EQ(rank.memory[at(other, 0)], 77.0F);
  }
}

TEST_P(CollectLaneTest, ranks_that_do_not_do_the_same_all_say_so_and_go_on_failing) {
  std::vector<Ticket> tickets;
  for (std::size_t i = 0; i < kRanks; ++i) {
    tickets.push_back(ranks_[i].lane->submit(label(Verb::gather, i == 1 ? 1 : 0), gather(ranks_[i]), {}));
  }
  for (std::size_t i = 0; i < kRanks; ++i) {
    const std::string said = failure_of(tickets[i]);
    EXPECT_NE(said.find("gather \"head\""), std::string::npos) << said;
    EXPECT_NE(said.find("gather \"tail\""), std::string::npos) << said;
    EXPECT_EQ(said.find("find_unused_parameters=True") == std::string::npos, GetParam()) << said;
    EXPECT_EQ(failure_of(ranks_[i].lane->submit(label(Verb::gather, 0), gather(ranks_[i]), {})), said);
    EXPECT_EQ(ranks_[i].memory[at(static_cast<int>(i), 0)], value(static_cast<int>(i), 0));
  }
}

TEST_P(CollectLaneTest, numbers_come_back_by_rank_behind_what_was_submitted) {
  std::vector<std::thread> threads;
  std::array<std::vector<std::int64_t>, kRanks> found;
  for (std::size_t i = 0; i < kRanks; ++i) {
    threads.emplace_back([&, i] {
      ranks_[i].lane->submit({OpId(static_cast<std::int64_t>(i)), Lane::collect, Verb::gather, UnitId(0)},
                             gather(ranks_[i]), {});
      found[i] = ranks_[i].lane->exchange({static_cast<std::int64_t>(i), 7}, SyncPoint::other).numbers;
      EXPECT_EQ(ranks_[i].memory[at(kRanks - 1, 1)], value(kRanks - 1, 1));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& numbers : found) EXPECT_EQ(numbers, (std::vector<std::int64_t>{0, 7, 1, 7, 2, 7}));
}

TEST_P(CollectLaneTest, a_rank_that_dies_fails_the_ops_of_all_others) {
  std::vector<Ticket> tickets;
  for (std::size_t i = 1; i < kRanks; ++i) {
    tickets.push_back(ranks_[i].lane->submit(label(Verb::gather, 0), gather(ranks_[i]), {}));
  }
  group_->leave();
  for (const Ticket& ticket : tickets) EXPECT_NE(failure_of(ticket).find("died"), std::string::npos);
}

TEST_P(CollectLaneTest, closing_ends_an_op_whose_giver_never_comes) {
  const Ticket never = ranks_[0].backend->open({OpId(next_op_++), Lane::compute, Verb::forward, UnitId(0)}, {});
  const Ticket ticket = ranks_[0].lane->submit(label(Verb::gather, 0), gather(ranks_[0]), {never});
  group_->leave();  // so that no exchange with them is left, which would have to end first
  ranks_[0].lane->close();
  EXPECT_NE(failure_of(ticket).find("closed"), std::string::npos);
  EXPECT_THROW(ranks_[0].lane->exchange({1}, SyncPoint::other), MachineError);
}

INSTANTIATE_TEST_SUITE_P(, CollectLaneTest, testing::Bool(), [](const testing::TestParamInfo<bool>& info) {
  return info.param ? "ranks_that_assist" : "ranks_that_do_the_same";
});

}  // namespace
}  // namespace noria
