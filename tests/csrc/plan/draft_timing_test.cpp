// In which backward early work begins, and after which drain.
#include "plan/draft_timing.h"

#include <gtest/gtest.h>

#include <vector>

namespace noria {
namespace {

constexpr UnitId kUnit{0}, kOther{1};
constexpr ItineraryId kFirst{0}, kSecond{1};

// A loop's backwards and steps; tells for each backward if it is expected to be the last.
struct Loop {
  bool backward(ItineraryId kind) {
    learned.begin_backward();
    const bool is_last = learned.is_last(kind);
    learned.end_backward(kind);
    return is_last;
  }
  LastBackward learned;
};

TEST(LastBackward, is_the_kind_that_a_step_followed_the_last_time) {
  Loop loop;
  for (const bool is_known : {false, true, true}) {
    EXPECT_FALSE(loop.backward(kFirst));  // another backward comes
    EXPECT_EQ(loop.backward(kSecond), is_known);
    loop.learned.end_step();
    loop.learned.end_step();  // a step without a backward changes nothing
  }
  EXPECT_FALSE(loop.backward(kSecond));
  loop.learned.end_step();
  EXPECT_TRUE(loop.backward(kSecond));
  loop.learned.forget(kSecond);
  loop.learned.end_step();
  EXPECT_FALSE(loop.backward(kFirst));
}

TEST(LastBackward, is_known_by_its_place_if_several_are_of_one_kind) {
  Loop loop;
  for (const bool is_known : {false, true, true}) {
    EXPECT_FALSE(loop.backward(kFirst));
    for (int micro_batch = 2; micro_batch < 4; ++micro_batch) EXPECT_FALSE(loop.backward(kSecond));
    EXPECT_EQ(loop.backward(kSecond), is_known);
    loop.learned.end_step();
  }
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

TEST(DraftTiming, waits_for_the_last_visit_that_needs_the_unit) {
  DraftTiming timing(1);
  const std::vector<Visit> expected = {visit_of({kUnit}), Visit{HookId(0), Phase::backward, {kUnit}, {}}};
  timing.begin_backward(&expected);
  EXPECT_FALSE(timing.note_drained(kUnit, Bytes{4}, 0, Bytes{4}));
}

}  // namespace
}  // namespace noria
