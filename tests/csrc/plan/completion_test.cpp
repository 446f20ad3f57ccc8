// When a unit's gradients are complete in a backward.
#include "plan/completion.h"

#include <gtest/gtest.h>

#include <vector>

namespace noria {
namespace {

constexpr UnitId kUnit{0}, kOther{1};

Visit visit_of(UnitId unit) { return Visit{HookId(unit.value), Phase::backward, {unit}, {unit}}; }

struct Row {
  int visits_made;                             // in forwards
  std::vector<int> expected;                   // units of the expected backward's visits; empty: none is expected
  std::vector<std::pair<int, bool>> backward;  // units visited, and if the unit is complete then
};

TEST(Completion, is_known_by_the_forwards_or_by_the_expected_backward_and_by_both_if_both_are) {
  const std::vector<Row> rows = {
      {1, {}, {{0, true}}},  // the forwards' count alone
      {2, {}, {{0, false}, {1, false}, {0, true}}},
      {0, {0, 1}, {{0, true}}},  // the expected backward alone
      {0, {0, 1, 0}, {{0, false}, {1, true}, {0, true}}},
      {2, {0, 1}, {{0, false}, {0, true}}},                // the count says that more will come
      {1, {0, 1, 0}, {{0, false}, {1, true}, {0, true}}},  // the expected backward says so
      {0, {}, {{0, false}, {0, false}}},                   // nothing is known: at the end of the pass
  };
  for (const Row& row : rows) {
    Completion completion(2);
    for (int made = 0; made < row.visits_made; ++made) completion.note_forward(kUnit);
    std::vector<Visit> expected;
    for (const int unit : row.expected) expected.push_back(visit_of(UnitId(unit)));
    completion.begin_backward(expected.empty() ? nullptr : &expected);
    for (UnitId unit : {kUnit, kOther}) completion.expect(unit);
    std::int64_t position = 0;
    for (const auto& [unit, is_complete] : row.backward) {
      completion.note_backward(UnitId(unit), /*completes=*/true);
      EXPECT_EQ(completion.is_complete(UnitId(unit), position), is_complete) << "at " << position;
      ++position;
    }
  }
}

TEST(Completion, takes_a_backward_that_only_accumulates_off_the_count) {
  Completion completion(1);
  completion.note_forward(kUnit);
  completion.note_forward(kUnit);  // of two micro-batches
  completion.begin_backward(nullptr);
  completion.note_backward(kUnit, /*completes=*/false);
  completion.begin_backward(nullptr);
  completion.expect(kUnit);
  completion.note_backward(kUnit, /*completes=*/true);
  EXPECT_TRUE(completion.is_complete(kUnit, 0));
}

TEST(Completion, knows_what_the_expected_backward_has_passed) {
  Completion completion(2);
  const std::vector<Visit> expected = {visit_of(kUnit), visit_of(kOther)};
  completion.begin_backward(&expected);
  EXPECT_FALSE(completion.is_past(kUnit, 0));
  EXPECT_TRUE(completion.is_past(kUnit, 1));
  completion.begin_backward(nullptr);
  EXPECT_FALSE(completion.is_past(kUnit, 9));
}

}  // namespace
}  // namespace noria
