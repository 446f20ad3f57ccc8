#include "comm/announcer.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <future>
#include <string>

#include "local_collectives.h"

namespace noria {
namespace {

constexpr int kRanks = 3;

/// Counts exchanges, and lets the first one begin only when the test opens it.
class CountingCollectives final : public LocalCollectives {
 public:
  CountingCollectives(std::shared_ptr<LocalGroup> group, int rank, std::shared_future<void> opened)
      : LocalCollectives(std::move(group), rank),
        opened_(std::move(opened)) {}
  std::vector<std::int64_t> exchange(const std::vector<std::int64_t>& numbers) override {
    ++num_exchanges_;
    opened_.wait();
    return LocalCollectives::exchange(numbers);
  }
  int num_exchanges() const { return num_exchanges_; }

 private:
  const std::shared_future<void> opened_;
  std::atomic<int> num_exchanges_ = 0;
};

class AnnouncerTest : public testing::Test {
 protected:
  using Agreed = std::shared_future<Announcer::Numbers>;

  AnnouncerTest() {
    for (int rank = 0; rank < kRanks; ++rank) {
      collectives_.push_back(std::make_shared<CountingCollectives>(group_, rank, opened_));
      announcers_.push_back(
          std::make_unique<Announcer>(collectives_.back(), std::vector<std::string>{"head", "body", "tail"}));
    }
  }
  ~AnnouncerTest() override {
    open();
    group_->leave();
    for (auto& each : announcers_) each->close();
  }

  void open() {
    if (!std::exchange(is_open_, true)) opens_.set_value();
  }
  Agreed gather(int rank, std::int64_t unit, std::int64_t version = 0) {
    return announce(rank, {Intent::Act::gather, Phase::forward, unit, version, 0});
  }
  Agreed announce(int rank, const Intent& intent, Announcer::Numbers numbers = {}) {
    return announcers_[static_cast<std::size_t>(rank)]->announce(intent, std::move(numbers));
  }
  static std::string failure_of(const Agreed& agreed) {
    try {
      agreed.get();
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  }

  const std::shared_ptr<LocalGroup> group_ = std::make_shared<LocalGroup>(kRanks);
  std::vector<std::shared_ptr<CountingCollectives>> collectives_;
  std::vector<std::unique_ptr<Announcer>> announcers_;

 private:
  std::promise<void> opens_;
  const std::shared_future<void> opened_ = opens_.get_future().share();
  bool is_open_ = false;
};

TEST_F(AnnouncerTest, ops_that_are_queued_together_are_agreed_on_in_one_exchange) {
  std::vector<Agreed> agreed;
  for (int rank = 0; rank < kRanks; ++rank) agreed.push_back(gather(rank, 0));
  while (collectives_[0]->num_exchanges() + collectives_[1]->num_exchanges() + collectives_[2]->num_exchanges() <
         kRanks)
    std::this_thread::yield();  // each announcer has begun its first exchange, about one op
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int op = 0; op < 8; ++op) agreed.push_back(gather(rank, op % 3));
  }
  open();
  for (const Agreed& each : agreed) EXPECT_EQ(failure_of(each), "");
  for (const auto& each : collectives_) EXPECT_EQ(each->num_exchanges(), 2);
}

TEST_F(AnnouncerTest, a_rank_that_has_queued_less_holds_up_only_what_it_has_not_queued) {
  open();
  std::array<std::vector<Agreed>, kRanks> agreed;
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int op = 0; op <= rank; ++op) agreed[static_cast<std::size_t>(rank)].push_back(gather(rank, op));
  }
  for (const auto& its : agreed) EXPECT_EQ(failure_of(its[0]), "");
  EXPECT_NE(agreed[2][1].wait_for(std::chrono::seconds(0)), std::future_status::ready);
  agreed[0].push_back(gather(0, 1));
  for (const auto& its : agreed) EXPECT_EQ(failure_of(its[1]), "");
  EXPECT_NE(agreed[2][2].wait_for(std::chrono::seconds(0)), std::future_status::ready);
}

TEST_F(AnnouncerTest, what_comes_before_a_difference_is_agreed_on_and_all_that_follows_fails_alike) {
  std::array<std::vector<Agreed>, kRanks> agreed;
  for (int rank = 0; rank < kRanks; ++rank) {
    auto& its = agreed[static_cast<std::size_t>(rank)];
    its.push_back(gather(rank, 0));
    its.push_back(gather(rank, rank == 1 ? 2 : 1));
    its.push_back(gather(rank, 0));
  }
  open();
  const std::string said = failure_of(agreed[0][1]);
  for (const char* part :
       {"rank 0 about to gather \"body\"", "rank 1 to gather \"tail\"", "find_unused_parameters=True"}) {
    EXPECT_NE(said.find(part), std::string::npos) << said;
  }
  for (const auto& its : agreed) {
    EXPECT_EQ(failure_of(its[0]), "");
    EXPECT_EQ(failure_of(its[1]), said);
    EXPECT_EQ(failure_of(its[2]), said);
  }
  EXPECT_EQ(failure_of(gather(0, 0)), said);
}

TEST_F(AnnouncerTest, ranks_that_have_other_versions_of_a_unit_are_told_both) {
  open();
  const std::array<Agreed, kRanks> agreed{gather(0, 1, 4), gather(1, 1, 4), gather(2, 1, -3)};
  for (const Agreed& each : agreed) {
    EXPECT_NE(failure_of(each).find("as step 4 left it"), std::string::npos);
    EXPECT_NE(failure_of(each).find("as it was loaded after step 2"), std::string::npos);
  }
}

TEST_F(AnnouncerTest, numbers_of_an_op_come_with_the_agreement_on_it) {
  open();
  std::vector<Agreed> agreed;
  for (int rank = 0; rank < kRanks; ++rank) {
    gather(rank, 0);
    agreed.push_back(announce(rank, {Intent::Act::reduce, Phase::backward, 2, 0, 0}, {rank, 10 + rank}));
    gather(rank, 1);
  }
  for (const Agreed& each : agreed) EXPECT_EQ(each.get(), (Announcer::Numbers{0, 10, 1, 11, 2, 12}));
}

}  // namespace
}  // namespace noria
