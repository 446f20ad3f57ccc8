// Which saved bundles leave and which return, as tables.
#include "plan/activation_plan.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

namespace noria {
namespace {

constexpr HookId kFirst{0}, kSecond{1}, kThird{2};
const IsAlive kAllAlive = [](std::size_t) { return true; };

/// Forwards begin, and nothing is known of the order of their backwards: it is expected to be that of the forwards.
BackwardOrder order_of(int num_forwards) {
  BackwardOrder order;
  for (int nth = 0; nth < num_forwards; ++nth) order.begin_forward(nth == 0);
  return order;
}

TEST(SavedRoom, bounds_what_lies_on_the_device) {
  struct Row {
    std::optional<Bytes> room;
    Bytes largest, most_saved, most, may_stay;
  };
  const std::vector<Row> rows = {
      {std::nullopt, Bytes{10}, Bytes{100}, Bytes{40}, Bytes{0}},  // four bundles; none stays longer than it must
      {Bytes{50}, Bytes{10}, Bytes{100}, Bytes{50}, Bytes{30}},    // less two: one is saved while one leaves
      {Bytes{50}, Bytes{10}, Bytes{50}, Bytes{50}, Bytes{50}},     // all fits
      {Bytes{50}, Bytes{10}, Bytes{51}, Bytes{50}, Bytes{30}},
  };
  for (const Row& row : rows) {
    const SavedRoom room{row.room, row.largest};
    EXPECT_EQ(room.most(), row.most);
    EXPECT_EQ(room.may_stay(row.most_saved), row.may_stay);
    EXPECT_EQ(room.least(), Bytes{20});  // one of the visit at hand, one that comes or leaves
  }
}

TEST(SavedRoom, keeps_two_bundles_free_of_what_comes_ahead) {
  const SavedRoom room{Bytes{50}, Bytes{10}};
  EXPECT_TRUE(room.has_room_ahead(Bytes{20}, Bytes{10}));
  EXPECT_FALSE(room.has_room_ahead(Bytes{20}, Bytes{11}));
}

TEST(BytesToLeave, counts_what_is_leaving_already) {
  EXPECT_EQ(bytes_to_leave(Bytes{9}, Bytes{0}, Bytes{2}, Bytes{10}), Bytes{1});
  EXPECT_EQ(bytes_to_leave(Bytes{9}, Bytes{1}, Bytes{2}, Bytes{10}), Bytes{0});
  EXPECT_EQ(bytes_to_leave(Bytes{5}, Bytes{0}, Bytes{2}, Bytes{10}), Bytes{0});
}

TEST(Farthest, is_the_first_bundle_of_the_last_backward) {
  const BackwardOrder order = order_of(3);
  EXPECT_EQ(farthest({1, 1, 2, 2, 3, 3}, order), 4U);
  EXPECT_EQ(farthest({1, 1}, order), 0U);
  EXPECT_EQ(farthest({3, 1, 2}, order), 0U);
}

TEST(Enough, takes_the_smallest_that_is_enough) {
  const std::vector<Bytes> sizes = {Bytes{4}, Bytes{1}, Bytes{8}, Bytes{2}};
  using Indices = std::vector<std::size_t>;
  EXPECT_EQ(enough(sizes, Bytes{3}), Indices{0});
  EXPECT_EQ(enough(sizes, Bytes{8}), Indices{2});
  EXPECT_EQ(enough(sizes, Bytes{9}), (Indices{2, 1}));
  EXPECT_EQ(enough(sizes, Bytes{11}), (Indices{2, 0}));
  EXPECT_EQ(enough(sizes, Bytes{99}), (Indices{2, 0, 3, 1}));
  EXPECT_EQ(enough(sizes, Bytes{0}), Indices{});
}

TEST(NextUsed, is_the_last_bundle_of_the_earliest_forward) {
  const std::vector<SavedBundle> bundles = {{kFirst, 1}, {kSecond, 1}, {kFirst, 1}, {kFirst, 2}};
  EXPECT_EQ(next_used(bundles, kFirst, kAllAlive), 2U);  // called twice in one forward: its backward is in reverse
  EXPECT_EQ(next_used(bundles, kSecond, kAllAlive), 1U);
  EXPECT_EQ(next_used(bundles, kThird, kAllAlive), std::nullopt);
  EXPECT_EQ(next_used(bundles, kFirst, [](std::size_t index) { return index != 2; }), 0U);
  std::vector<SavedBundle> used = bundles;
  used[0].is_used = used[2].is_used = true;
  EXPECT_EQ(next_used(used, kFirst, kAllAlive), 3U);
}

TEST(NeededAfter, goes_back_through_the_forward_and_on_to_the_next_backward) {
  std::vector<SavedBundle> bundles = {{kFirst, 1}, {kSecond, 1}, {kFirst, 2}, {kSecond, 2}};
  const BackwardOrder order = order_of(2);
  bundles[1].is_used = true;
  EXPECT_EQ(needed_after(bundles, 1, order, kAllAlive), 0U);
  bundles[0].is_used = true;
  EXPECT_EQ(needed_after(bundles, 0, order, kAllAlive), 3U);
  EXPECT_EQ(needed_after(bundles, 0, order, [](std::size_t index) { return index != 3; }), 2U);
  bundles[2].is_used = bundles[3].is_used = true;
  EXPECT_EQ(needed_after(bundles, 0, order, kAllAlive), std::nullopt);
}

TEST(NeededAfter, names_nothing_if_a_forward_that_has_yet_to_begin_comes_first) {
  BackwardOrder order = order_of(3);
  for (const std::int64_t forward : {1, 3, 2}) order.note_backward(forward);  // the order of a round
  order.begin_forward(true);
  order.begin_forward(false);  // forwards 4 and 5; the backward of 6 is expected before that of 5
  std::vector<SavedBundle> bundles = {{kFirst, 4, true}, {kFirst, 5}};
  EXPECT_EQ(needed_after(bundles, 0, order, kAllAlive), std::nullopt);
  order.begin_forward(false);
  bundles.push_back({kFirst, 6});
  EXPECT_EQ(needed_after(bundles, 0, order, kAllAlive), 2U);
}

}  // namespace
}  // namespace noria
