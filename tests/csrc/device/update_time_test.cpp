// Where updates went, by hand: passes from 0 to 10 (forward) and from 10 to 30 (backward), in microseconds.
#include "device/update_time.h"

#include <gtest/gtest.h>

#include "device/timing.h"

namespace noria {
namespace {

constexpr std::int64_t kUs = 1000;

void visit(UpdateTime& time, Verb verb, std::int64_t start_us, std::int64_t end_us) {
  time.worked(Lane::compute, verb, start_us * kUs, end_us * kUs);
}

void update(UpdateTime& time, std::int64_t start_us, std::int64_t end_us) {
  time.worked(Lane::update, Verb::update, start_us * kUs, end_us * kUs);
}

void expect(const UpdateTime& time, std::int64_t forward_us, std::int64_t backward_us) {
  EXPECT_EQ(time.behind().forward_us, forward_us);
  EXPECT_EQ(time.behind().backward_us, backward_us);
}

TEST(UpdateTimeTest, an_update_lies_behind_what_it_has_in_common_with_a_visit) {
  UpdateTime time;
  visit(time, Verb::forward, 0, 10);
  update(time, 5, 15);
  expect(time, 5, 0);
  visit(time, Verb::backward, 10, 30);
  expect(time, 5, 5);
  update(time, 25, 40);
  expect(time, 5, 10);
}

TEST(UpdateTimeTest, visits_of_a_device_may_be_learnt_after_the_updates) {
  UpdateTime time;
  update(time, 5, 15);
  update(time, 25, 40);
  visit(time, Verb::forward, 0, 10);
  visit(time, Verb::backward, 10, 30);
  expect(time, 5, 10);
}

TEST(UpdateTimeTest, other_lanes_and_other_verbs_hide_nothing) {
  UpdateTime time;
  update(time, 0, 10);
  time.worked(Lane::compute, Verb::user, 0, 10 * kUs);
  time.worked(Lane::fetch, Verb::fetch, 0, 10 * kUs);
  expect(time, 0, 0);
}

TEST(UpdateTimeTest, what_was_before_does_not_count_whenever_it_is_learnt) {
  UpdateTime time;
  update(time, 0, 20);
  visit(time, Verb::forward, 0, 10);
  time.begin_counting(12 * kUs);
  expect(time, 0, 0);
  visit(time, Verb::backward, 10, 30);
  expect(time, 0, 8);
}

TEST(UpdateTimeTest, the_update_that_runs_counts_until_it_is_due) {
  UpdateTime time;
  const std::int64_t start_ns = now_ns() - 100 * kUs;
  time.worked(Lane::compute, Verb::forward, start_ns, start_ns + 60 * kUs);
  time.works(start_ns + 20 * kUs, start_ns + 50 * kUs);
  expect(time, 30, 0);
  time.stopped();
  expect(time, 0, 0);
  time.works(start_ns + 20 * kUs, start_ns + 50 * kUs);
  time.worked(Lane::update, Verb::update, start_ns + 20 * kUs, start_ns + 50 * kUs);
  expect(time, 30, 0);
}

TEST(UpdateTimeTest, what_can_have_nothing_more_in_common_is_forgotten_and_nothing_else) {
  UpdateTime time;
  for (std::int64_t i = 0; i < 5000; ++i) visit(time, Verb::forward, 10 * i, 10 * i + 5);
  update(time, 49'990, 50'000);  // behind the last one
  expect(time, 5, 0);
  for (std::int64_t i = 5000; i < 10'000; ++i) {
    visit(time, Verb::forward, 10 * i, 10 * i + 5);
    update(time, 10 * i + 2, 10 * i + 9);
  }
  expect(time, 5 + 5000 * 3, 0);
}

}  // namespace
}  // namespace noria
