#include "store/gradient_ring.h"

#include <gtest/gtest.h>

#include <set>

#include "base/errors.h"

namespace noria {
namespace {

bool always(int) { return true; }
bool never(int) { return false; }

TEST(GradientRing, hands_out_each_slot_once) {
  GradientRing ring(nullptr, Bytes{512}, 3);
  std::set<int> slots;
  for (int i = 0; i < 3; ++i) slots.insert(ring.take(never).value());
  EXPECT_EQ(slots, (std::set<int>{0, 1, 2}));
  EXPECT_EQ(ring.take(always), std::nullopt);
  ring.release(1);
  EXPECT_EQ(ring.take(never), 1);
  EXPECT_EQ(ring.offset(2), Bytes{1024});
}

TEST(GradientRing, prefers_a_slot_without_readers_and_else_the_one_that_was_given_back_last) {
  GradientRing ring(nullptr, Bytes{512}, 3);
  for (int i = 0; i < 3; ++i) ring.take(always);
  for (const int slot : {2, 0, 1}) ring.release(slot);
  EXPECT_EQ(ring.take([](int slot) { return slot == 0; }), 0);
  EXPECT_EQ(ring.take(never), 1);
  EXPECT_EQ(ring.take(never), 2);
}

TEST(GradientRing, refuses_to_take_back_what_it_has_not_given) {
  GradientRing ring(nullptr, Bytes{512}, 2);
  const int slot = ring.take(always).value();
  EXPECT_THROW(ring.release(1 - slot), InvariantError);
  ring.release(slot);
  EXPECT_THROW(ring.release(slot), InvariantError);
}

TEST(GradientRing, may_be_empty) {
  GradientRing ring(nullptr, Bytes{512}, 0);
  EXPECT_EQ(ring.take(always), std::nullopt);
}

}  // namespace
}  // namespace noria
