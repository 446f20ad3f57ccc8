// Layouts: aligned, dense, and the ledger adds up.
#include "store/layout.h"

#include <gtest/gtest.h>

#include "base/errors.h"

namespace noria {
namespace {

TEST(Layout, TensorsOfAUnitStartAlignedInTheOrderGiven) {
  const UnitLayout layout = lay_out_unit({{300, 2, 300}, {0, 4, 0}, {1, 4, 1}, {256, 2, 256}});
  ASSERT_EQ(layout.slots.size(), 4u);
  EXPECT_EQ(layout.slots[0].offset, Bytes{0});
  EXPECT_EQ(layout.slots[0].bytes, Bytes{600});
  EXPECT_EQ(layout.slots[1].offset, Bytes{1024});
  EXPECT_EQ(layout.slots[2].offset, Bytes{1024});
  EXPECT_EQ(layout.slots[3].offset, Bytes{1536});
  EXPECT_EQ(layout.total, Bytes{2048});
  EXPECT_EQ(lay_out_unit({}).total, Bytes{0});
}

TEST(Layout, TensorThatSharesElementsIsRefused) {
  EXPECT_THROW(lay_out_unit({{10, 4, 9}}), InvariantError);  // expanded: ten elements in the memory of nine
}

TEST(Layout, LedgerOfAHomeAddsUpToItsTotal) {
  const HomeLayout layout = lay_out_home({{UnitId(0), "working copy", Bytes{600}},
                                          {UnitId(0), "held gradients", Bytes{512}},
                                          {UnitId(1), "working copy", Bytes{1}}});
  EXPECT_EQ(layout.slots[1].offset, Bytes{1024});
  EXPECT_EQ(layout.slots[2].offset, Bytes{1536});
  EXPECT_EQ(layout.total, Bytes{2048});
  ASSERT_EQ(layout.ledger.size(), 2u);
  EXPECT_EQ(layout.ledger[0].purpose, "working copy");
  EXPECT_EQ(layout.ledger[0].bytes, Bytes{1536});
  EXPECT_EQ(layout.ledger[1].bytes, Bytes{512});
}

}  // namespace
}  // namespace noria
