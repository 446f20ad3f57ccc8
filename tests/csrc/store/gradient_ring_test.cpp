#include "store/gradient_ring.h"

#include <gtest/gtest.h>

#include "base/errors.h"

namespace noria {
namespace {

TEST(GradientRing, hands_out_slots_in_a_circle) {
  GradientRing ring(nullptr, Bytes{512}, 3);
  EXPECT_EQ(ring.take(), 0);
  EXPECT_EQ(ring.take(), 1);
  ring.release(0);
  EXPECT_EQ(ring.take(), 2) << "what was given back last is used last";
  EXPECT_EQ(ring.take(), 0);
  EXPECT_EQ(ring.take(), std::nullopt);
  ring.release(1);
  EXPECT_EQ(ring.take(), 1);
  EXPECT_EQ(ring.offset(2), Bytes{1024});
}

TEST(GradientRing, refuses_to_take_back_what_it_has_not_given) {
  GradientRing ring(nullptr, Bytes{512}, 2);
  ring.take();
  EXPECT_THROW(ring.release(1), InvariantError);
  ring.release(0);
  EXPECT_THROW(ring.release(0), InvariantError);
}

TEST(GradientRing, may_be_empty) {
  GradientRing ring(nullptr, Bytes{512}, 0);
  EXPECT_EQ(ring.take(), std::nullopt);
}

}  // namespace
}  // namespace noria
