// Units are kept at peers where that gives the busier of both links less to do, and only then.
#include "plan/copies.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace noria {
namespace {

using Chosen = std::vector<std::size_t>;

constexpr Bytes kUnit = kTensorAlignment;

double busiest_us(const std::vector<FetchedUnit>& units, const FetchLinks& links, const Chosen& chosen) {
  double home_us = links.home_us, peer_us = links.peer_us;
  for (std::size_t i = 0; i < units.size(); ++i) {
    const auto bytes = static_cast<double>(units[i].bytes.count);
    const bool is_kept = std::find(chosen.begin(), chosen.end(), i) != chosen.end();
    home_us += bytes * (is_kept ? 1 : units[i].num_fetches) * links.home_us_per_byte;
    if (is_kept) peer_us += bytes * units[i].num_fetches * links.peer_us_per_byte;
  }
  return std::max(home_us, peer_us);
}

TEST(Copies, a_fast_link_takes_all_that_has_room) {
  const std::vector<FetchedUnit> units(4, {kUnit, 8});
  EXPECT_EQ(choose_copies(units, {1, 0.1, 0, 0}, kUnit * 4), (Chosen{0, 1, 2, 3}));
  EXPECT_EQ(choose_copies(units, {1, 0.1, 0, 0}, kUnit * 3), (Chosen{0, 1, 2}));
  EXPECT_EQ(choose_copies(units, {1, 0.1, 0, 0}, kUnit - Bytes{1}), Chosen{});
}

TEST(Copies, a_link_as_fast_as_home_takes_half) {
  const std::vector<FetchedUnit> units(4, {kUnit, 8});
  EXPECT_EQ(choose_copies(units, {1, 1, 0, 0}, kUnit * 4), (Chosen{0, 1}));
}

TEST(Copies, a_slower_link_takes_nothing) {
  EXPECT_EQ(choose_copies(std::vector<FetchedUnit>(40, {kUnit, 8}), {1, 1.1, 0, 0}, kUnit * 40), Chosen{});
}

TEST(Copies, a_link_that_is_busy_with_more_than_the_other_takes_nothing) {
  const std::vector<FetchedUnit> units(4, {kUnit, 8});
  const double all_us = 4 * 8 * static_cast<double>(kUnit.count);
  EXPECT_EQ(choose_copies(units, {1, 0.1, 0, all_us}, kUnit * 4), Chosen{});
  EXPECT_EQ(choose_copies(units, {1, 1, all_us, all_us}, kUnit * 4), (Chosen{0, 1}));
}

TEST(Copies, a_unit_that_is_fetched_once_of_each_version_is_never_kept) {
  const std::vector<FetchedUnit> units{{kUnit, 1}, {kUnit, 2}, {kUnit, 0}};
  EXPECT_EQ(choose_copies(units, {1, 0, 0, 0}, kUnit * 4), Chosen{1});
}

TEST(Copies, those_that_are_fetched_most_come_first) {
  const std::vector<FetchedUnit> units{{kUnit, 4}, {kUnit * 3, 9}, {kUnit, 6}, {kUnit, 9}};
  EXPECT_EQ(choose_copies(units, {1, 0.01, 0, 0}, kUnit * 2), (Chosen{2, 3}));
  EXPECT_EQ(choose_copies(units, {1, 0.01, 0, 0}, kUnit * 5), (Chosen{1, 2, 3}));
}

TEST(Copies, no_choice_makes_the_busier_link_busier) {
  std::mt19937 random(1);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same cases each time
  const auto draw = [&](unsigned end) { return static_cast<double>(random() % end); };
  for (int round = 0; round < 500; ++round) {
    std::vector<FetchedUnit> units(random() % 6);
    for (FetchedUnit& unit : units) unit = {Bytes{1 + static_cast<int>(random() % 9)} * 512, static_cast<int>(draw(9))};
    const FetchLinks links{1 + draw(4), draw(4), draw(20'000), draw(20'000)};
    const Bytes room{static_cast<std::int64_t>(random() % 20) * 512};
    const Chosen chosen = choose_copies(units, links, room);
    Bytes taken;
    for (std::size_t unit : chosen) taken += units[unit].bytes;
    EXPECT_LE(taken, room);
    EXPECT_TRUE(std::is_sorted(chosen.begin(), chosen.end()));
    if (chosen.empty()) continue;
    EXPECT_LT(busiest_us(units, links, chosen), busiest_us(units, links, {}));
  }
}

}  // namespace
}  // namespace noria
