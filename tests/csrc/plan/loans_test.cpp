// What a stage needs, spares and asks back.
#include "plan/loans.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

namespace noria {
namespace {

constexpr Bytes kMiB{1 << 20}, kGranule{64 << 10};

struct Row {
  std::string what;
  SavedPeak saved;
  std::optional<Bytes> room;
  NeedAndSpare expected;
};

const std::vector<Row> kRows{
    {"without room, all of it leaves", {kMiB * 32, kMiB * 4}, std::nullopt, {kMiB * 32, {}}},
    {"what is not saved is spare", {kMiB * 32, kMiB * 4}, kMiB * 96, {{}, kMiB * 64}},
    {"two blocks always have room", {kMiB * 4, kMiB * 4}, kMiB * 96, {{}, kMiB * 88}},
    {"just enough", {kMiB * 32, kMiB * 4}, kMiB * 32, {{}, {}}},
    {"less room than two blocks", {kMiB * 4, kMiB * 4}, kMiB * 6, {{}, {}}},
    {"whole blocks, and three more", {kMiB * 32, kMiB * 4}, kMiB * 27, {kMiB * 20, {}}},
    {"nothing was saved", {{}, {}}, kMiB * 6, {{}, kMiB * 6}},
};

TEST(Loans, need_is_what_the_room_does_not_hold_and_spare_what_is_left_of_it) {
  for (const Row& row : kRows) EXPECT_EQ(need_and_spare(row.saved, row.room), row.expected) << row.what;
}

TEST(Loans, lender_lacks_what_it_needs_beyond_the_room_that_it_has_not_lent) {
  EXPECT_EQ(lacking({kMiB * 32, kMiB}, kMiB * 96, kMiB * 64), Bytes{});
  EXPECT_EQ(lacking({kMiB * 48, kMiB}, kMiB * 96, kMiB * 64), kMiB * 16);
  EXPECT_EQ(lacking({kMiB * 200, kMiB}, kMiB * 96, kMiB * 64), kMiB * 64);  // never more than it has lent
  EXPECT_LT(lacking({kMiB, kMiB}, kMiB * 96, kMiB * 64), Bytes{});
}

struct Asked {
  std::string what;
  std::vector<Bytes> kept;
  Bytes lacking;
  bool in_parts;
  std::vector<Bytes> expected;
};

const std::vector<Asked> kAsked{
    {"nothing is lacking", {kMiB}, {}, true, {kMiB}},
    {"in proportion to the loans", {kMiB * 12, kMiB * 4}, kMiB * 8, true, {kMiB * 6, kMiB * 2}},
    {"in whole granules", {kMiB, kMiB}, {1}, true, {kMiB - kGranule, kMiB - kGranule}},
    {"more than is lent", {kMiB, kMiB}, kMiB * 3, true, {{}, {}}},
    {"all at once", {kMiB * 12, kMiB * 4}, {1}, false, {{}, {}}},
    {"some have given back already", {{}, kMiB * 4}, kMiB, true, {{}, kMiB * 3}},
    {"none has any", {{}, {}}, kMiB, true, {{}, {}}},
    {"large loans", {kMiB * 160'000, kMiB * 160'000}, kMiB * 160'000, true, {kMiB * 80'000, kMiB * 80'000}},
};

TEST(Loans, borrowers_keep_what_the_lender_does_not_lack) {
  for (const Asked& row : kAsked) EXPECT_EQ(ask_back(row.kept, row.lacking, row.in_parts), row.expected) << row.what;
}

}  // namespace
}  // namespace noria
