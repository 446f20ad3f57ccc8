#include "store/gradient_ring.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "base/errors.h"

namespace noria {
namespace {

TEST(GradientRing, hands_out_ranges_in_a_circle) {
  GradientRing ring(nullptr, Bytes{100});
  EXPECT_EQ(ring.take(Bytes{40}), Bytes{0});
  EXPECT_EQ(ring.take(Bytes{40}), Bytes{40});
  ring.release(Bytes{0});
  EXPECT_EQ(ring.take(Bytes{20}), Bytes{80}) << "what was given back last is used last";
  EXPECT_EQ(ring.take(Bytes{40}), Bytes{0});
  EXPECT_EQ(ring.take(Bytes{1}), std::nullopt);
}

TEST(GradientRing, takes_nothing_when_what_is_free_is_cut_too_small) {
  GradientRing ring(nullptr, Bytes{100});
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(ring.take(Bytes{20}));
  ring.release(Bytes{20});
  ring.release(Bytes{60});
  EXPECT_EQ(ring.take(Bytes{30}), std::nullopt);
  ring.release(Bytes{40});
  EXPECT_EQ(ring.take(Bytes{60}), Bytes{20});
}

TEST(GradientRing, refuses_to_take_back_what_it_has_not_given) {
  GradientRing ring(nullptr, Bytes{100});
  ring.take(Bytes{20});
  EXPECT_THROW(ring.release(Bytes{10}), InvariantError);
}

TEST(GradientRing, ranges_never_overlap_and_a_range_is_found_wherever_one_is) {
  std::mt19937 random(1);
  GradientRing ring(nullptr, Bytes{64});
  std::vector<bool> used(64, false);
  std::vector<std::pair<std::int64_t, std::int64_t>> taken;
  for (int i = 0; i < 20'000; ++i) {
    if (!taken.empty() && random() % 2 == 0) {
      const std::size_t which = random() % taken.size();
      const auto [offset, size] = taken[which];
      ring.release(Bytes{offset});
      for (std::int64_t at = offset; at < offset + size; ++at) used[static_cast<std::size_t>(at)] = false;
      taken.erase(taken.begin() + static_cast<std::ptrdiff_t>(which));
      continue;
    }
    const auto size = static_cast<std::int64_t>(1 + random() % 20);
    const auto found = ring.take(Bytes{size});
    std::int64_t longest = 0;
    std::int64_t free = 0;
    for (const bool is_used : used) {
      free = is_used ? 0 : free + 1;
      longest = std::max(longest, free);
    }
    ASSERT_EQ(found.has_value(), longest >= size);
    if (!found) continue;
    for (std::int64_t at = found->count; at < found->count + size; ++at) {
      ASSERT_FALSE(used.at(static_cast<std::size_t>(at)));
      used[static_cast<std::size_t>(at)] = true;
    }
    taken.emplace_back(found->count, size);
  }
}

}  // namespace
}  // namespace noria
