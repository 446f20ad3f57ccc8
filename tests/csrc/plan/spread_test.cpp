#include "plan/spread.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace noria {
namespace {

constexpr std::int64_t kMiB = 1 << 20;

struct Row {
  std::string what;
  Bytes bytes;
  std::vector<PeerRoom> peers;
  std::vector<PeerShare> expected;
};

const std::vector<Row> kRows{
    {"no peer lends", {kMiB}, {}, {}},
    {"one peer", {kMiB}, {{1, {9 * kMiB}}}, {{0, {0}, {kMiB}}}},
    {"equal links", {2 * kMiB}, {{1, {9 * kMiB}}, {1, {9 * kMiB}}}, {{0, {0}, {kMiB}}, {1, {kMiB}, {kMiB}}}},
    {"a faster link gets more",
     {3 * kMiB},
     {{2, {9 * kMiB}}, {1, {9 * kMiB}}},
     {{0, {0}, {2 * kMiB}}, {1, {2 * kMiB}, {kMiB}}}},
    {"the most room comes first",
     {2 * kMiB},
     {{1, {3 * kMiB}}, {1, {9 * kMiB}}},
     {{1, {0}, {kMiB}}, {0, {kMiB}, {kMiB}}}},
    {"what is small is not cut", {300 << 10}, {{1, {3 * kMiB}}, {1, {9 * kMiB}}}, {{1, {0}, {300 << 10}}}},
    {"a peer that is out gets nothing", {2 * kMiB}, {{1, {9 * kMiB}, true}, {1, {3 * kMiB}}}, {{1, {0}, {2 * kMiB}}}},
    {"all are out", {kMiB}, {{1, {9 * kMiB}, true}}, {}},
    {"shares begin where tensors may",
     {kMiB + 2},
     {{1, {9 * kMiB}}, {1, {9 * kMiB}}},
     {{0, {0}, {kMiB / 2 + 512}}, {1, {kMiB / 2 + 512}, {kMiB / 2 - 510}}}},
};

TEST(Spread, each_peer_gets_what_its_link_carries_in_the_same_time) {
  for (const Row& row : kRows) {
    const auto found = spread(row.bytes, row.peers);
    ASSERT_EQ(found.size(), row.expected.size()) << row.what;
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i].peer, row.expected[i].peer) << row.what;
      EXPECT_EQ(found[i].begin, row.expected[i].begin) << row.what;
      EXPECT_EQ(found[i].bytes, row.expected[i].bytes) << row.what;
    }
  }
}

}  // namespace
}  // namespace noria
