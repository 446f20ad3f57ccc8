// The order of a round's backwards is the last round's.
#include "plan/backward_order.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace noria {
namespace {

/// A round of so many forwards, whose backwards come in this order, by number in the round.
void make_round(BackwardOrder& order, int num_forwards, const std::vector<int>& backwards) {
  for (int nth = 0; nth < num_forwards; ++nth) order.begin_forward(nth == 0);
  const std::int64_t first = order.newest() - num_forwards + 1;
  for (const int nth : backwards) {
    order.note_backward(first + nth);
    order.note_backward(first + nth);  // each is asked for many things
  }
}

/// By number in the round, of forwards that all have begun.
bool comes_before(const BackwardOrder& order, int num_forwards, int one, int other) {
  const std::int64_t first = order.newest() - num_forwards + 1;
  return order.comes_before(first + one, first + other);
}

TEST(BackwardOrder, is_that_of_forwards_until_another_one_is_known) {
  BackwardOrder order;
  make_round(order, 3, {2, 0, 1});
  EXPECT_TRUE(comes_before(order, 3, 0, 1));
  EXPECT_TRUE(comes_before(order, 3, 1, 2));
  make_round(order, 3, {});
  EXPECT_TRUE(comes_before(order, 3, 2, 0));
  EXPECT_TRUE(comes_before(order, 3, 0, 1));
  EXPECT_FALSE(comes_before(order, 3, 1, 1));
}

TEST(BackwardOrder, is_kept_where_no_backward_came_and_continued_where_more_forwards_come) {
  BackwardOrder order;
  make_round(order, 2, {1, 0});
  make_round(order, 2, {});
  make_round(order, 4, {});
  for (const auto& [one, other] : std::vector<std::pair<int, int>>{{1, 0}, {0, 2}, {2, 3}}) {
    EXPECT_TRUE(comes_before(order, 4, one, other)) << one << ' ' << other;
  }
}

TEST(BackwardOrder, of_a_forward_that_had_none_is_its_own_place) {
  BackwardOrder order;
  make_round(order, 3, {2, 1});
  make_round(order, 3, {});
  EXPECT_TRUE(comes_before(order, 3, 2, 1));
  EXPECT_TRUE(comes_before(order, 3, 0, 1));
}

TEST(BackwardOrder, knows_of_forwards_that_have_yet_to_begin) {
  BackwardOrder order;
  make_round(order, 4, {1, 3, 0, 2});
  order.begin_forward(true);
  const std::int64_t first = order.newest();
  EXPECT_TRUE(order.awaits_one_before(first));
  order.begin_forward(false);
  EXPECT_TRUE(order.awaits_one_before(first));  // the fourth's
  EXPECT_FALSE(order.awaits_one_before(first + 1));
  order.begin_forward(false);
  order.begin_forward(false);
  EXPECT_FALSE(order.awaits_one_before(first));
}

TEST(BackwardOrder, is_not_changed_by_a_graph_that_was_kept) {
  BackwardOrder order;
  order.note_backward(order.newest());  // before any forward
  make_round(order, 2, {0, 1});
  const std::int64_t kept = order.newest();
  make_round(order, 2, {});
  order.note_backward(kept);
  make_round(order, 2, {});
  EXPECT_TRUE(comes_before(order, 2, 0, 1));
}

}  // namespace
}  // namespace noria
