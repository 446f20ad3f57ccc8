// In which backward early work begins, and after which drain.
#include "plan/draft_timing.h"

#include <gtest/gtest.h>

#include <vector>

namespace noria {
namespace {

constexpr UnitId kUnit{0}, kOther{1};
constexpr ItineraryId kFirst{0}, kSecond{1};

TEST(LastBackward, is_the_kind_that_a_step_followed_the_last_time) {
  LastBackward learned;
  EXPECT_FALSE(learned.is_last(kFirst));
  const auto backward = [&](ItineraryId kind) {
    learned.begin_backward();
    learned.end_backward(kind);
  };
  backward(kFirst);
  backward(kSecond);
  learned.end_step();
  EXPECT_FALSE(learned.is_last(kFirst));  // another backward came first
  EXPECT_TRUE(learned.is_last(kSecond));
  backward(kFirst);
  learned.end_step();
  EXPECT_TRUE(learned.is_last(kFirst));
  learned.end_step();  // a step without a backward changes nothing
  backward(kSecond);
  backward(kFirst);
  EXPECT_FALSE(learned.is_last(kSecond));
  learned.forget(kFirst);
  EXPECT_FALSE(learned.is_last(kFirst));
}

Visit visit_of(std::vector<UnitId> gradients) { return Visit{HookId(0), Phase::backward, gradients, gradients}; }

TEST(DraftTiming, waits_for_all_bytes_and_for_the_last_visit) {
  DraftTiming timing(2);
  const std::vector<Visit> expected = {visit_of({kUnit}), visit_of({kOther}), visit_of({kUnit})};
  timing.begin_backward(&expected);
  EXPECT_FALSE(timing.note_drained(kUnit, Bytes{4}, 0, Bytes{4}));  // all bytes, but more visits come
  EXPECT_TRUE(timing.note_drained(kOther, Bytes{4}, 1, Bytes{4}));
  EXPECT_FALSE(timing.note_drained(kUnit, Bytes{4}, 2, Bytes{4}));  // more bytes than awaited
  timing.begin_backward(&expected);
  EXPECT_FALSE(timing.note_drained(kUnit, Bytes{2}, 2, Bytes{4}));
  EXPECT_TRUE(timing.note_drained(kUnit, Bytes{2}, 3, Bytes{4}));
}

TEST(DraftTiming, takes_a_shard_as_a_whole) {
  DraftTiming timing(1);
  const std::vector<Visit> expected = {visit_of({kUnit}), visit_of({kUnit})};
  timing.begin_backward(&expected);
  EXPECT_FALSE(timing.note_drained(kUnit, Bytes{1}, 0, std::nullopt));
  EXPECT_TRUE(timing.note_drained(kUnit, Bytes{1}, 1, std::nullopt));
  timing.begin_backward(nullptr);
  EXPECT_TRUE(timing.note_drained(kUnit, Bytes{1}, 0, std::nullopt));
}

}  // namespace
}  // namespace noria
