#include "base/ranges.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace noria {
namespace {

using Range = Ranges::Range;

std::vector<Range> runs_of(const std::set<std::int64_t>& bytes, std::int64_t begin, std::int64_t end, bool in) {
  std::vector<Range> runs;
  for (std::int64_t i = begin; i < end; ++i) {
    if (bytes.contains(i) != in) continue;
    if (!runs.empty() && runs.back().second == Bytes{i}) runs.back().second = Bytes{i + 1};
    else runs.emplace_back(Bytes{i}, Bytes{i + 1});
  }
  return runs;
}

TEST(Ranges, are_what_a_set_of_single_bytes_is) {
  constexpr std::int64_t kSize = 24;
  std::mt19937 random(1);
  const auto draw = [&] { return static_cast<std::int64_t>(random() % (kSize + 1)); };
  for (int trial = 0; trial < 200; ++trial) {
    Ranges ranges;
    std::set<std::int64_t> twin;
    for (int step = 0; step < 12; ++step) {
      const std::int64_t begin = draw();
      const std::int64_t end = draw();
      const bool adds = random() % 3 != 0;
      if (adds) ranges.add(Bytes{begin}, Bytes{end});
      else ranges.remove(Bytes{begin}, Bytes{end});
      for (std::int64_t i = begin; i < end; ++i) {
        if (adds) twin.insert(i);
        else twin.erase(i);
      }
      const std::int64_t from = draw();
      const std::int64_t to = draw();
      ASSERT_EQ(ranges.within(Bytes{from}, Bytes{to}), runs_of(twin, from, to, true));
      ASSERT_EQ(ranges.missing(Bytes{from}, Bytes{to}), runs_of(twin, from, to, false));
      ASSERT_EQ(std::vector<Range>(ranges.begin(), ranges.end()), runs_of(twin, 0, kSize, true));
      ASSERT_EQ(ranges.empty(), twin.empty());
    }
  }
}

}  // namespace
}  // namespace noria
