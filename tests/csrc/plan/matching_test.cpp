// What stages lend each other is never more than they have, never more than is needed, as even as it can be, and in
// proportion to the links.
#include "plan/matching.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace noria {
namespace {

constexpr Bytes kGranule = kLoanGranule;

using Bandwidth = std::vector<std::vector<double>>;

Bandwidth even(std::size_t size) { return Bandwidth(size, std::vector<double>(size, 1)); }

std::map<int, Bytes> sums(const std::vector<MemoryLoan>& loans, int MemoryLoan::* side) {
  std::map<int, Bytes> result;
  for (const MemoryLoan& loan : loans) result[loan.*side] += loan.bytes;
  return result;
}

std::vector<MemoryOffer> random_offers(std::mt19937& random, std::size_t size, int num_machines) {
  std::vector<MemoryOffer> offers;
  for (std::size_t i = 0; i < size; ++i) {
    MemoryOffer offer;
    offer.machine = std::to_string(static_cast<int>(random()) % num_machines);
    const Bytes amount{static_cast<std::int64_t>(random() % 5'000'000)};
    (random() % 2 == 0 ? offer.needed : offer.spare) = amount;
    offer.wanted = Bytes{static_cast<std::int64_t>(random() % 3 == 0 ? random() % 2'000'000 : 0)};
    offers.push_back(offer);
  }
  return offers;
}

TEST(Matching, no_stage_lends_more_than_it_has_or_borrows_more_than_it_needs) {
  std::mt19937 random(1);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same cases each time
  for (int round = 0; round < 500; ++round) {
    const std::size_t size = 1 + random() % 9;
    const auto offers = random_offers(random, size, 1 + static_cast<int>(random() % 3));
    Bandwidth bandwidth = even(size);
    for (auto& row : bandwidth) {
      for (double& link : row) link = static_cast<double>(random() % 4);
    }
    const auto loans = match(offers, bandwidth);
    EXPECT_EQ(loans, match(offers, bandwidth));
    std::map<int, Bytes> ends;
    for (const MemoryLoan& loan : loans) {
      const auto lender = static_cast<std::size_t>(loan.lender), borrower = static_cast<std::size_t>(loan.borrower);
      EXPECT_EQ(offers[lender].machine, offers[borrower].machine);
      EXPECT_GT(bandwidth[lender][borrower], 0);
      EXPECT_GT(loan.bytes, Bytes{0});
      EXPECT_LE(loan.wanted, loan.bytes);
      EXPECT_NE(loan.lender, loan.borrower);
      EXPECT_EQ(loan.bytes.count % kGranule.count, 0);
      EXPECT_EQ(loan.offset, ends[loan.lender]);  // so none overlap
      ends[loan.lender] = loan.offset + loan.bytes;
    }
    for (const auto& [lender, bytes] : sums(loans, &MemoryLoan::lender)) {
      EXPECT_LE(bytes, offers[static_cast<std::size_t>(lender)].spare);
    }
    for (const auto& [borrower, bytes] : sums(loans, &MemoryLoan::borrower)) {
      const MemoryOffer& offer = offers[static_cast<std::size_t>(borrower)];
      EXPECT_LE(bytes, align_up(offer.needed, kGranule) + align_up(offer.wanted, kGranule));
    }
  }
}

TEST(Matching, no_memory_stays_spare_while_a_stage_needs_it) {
  std::mt19937 random(2);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same cases each time
  for (int round = 0; round < 500; ++round) {
    const std::size_t size = 2 + random() % 8;
    const auto offers = random_offers(random, size, 1);
    Bytes needed, spare, lent;
    for (const MemoryOffer& offer : offers) {
      needed += align_up(offer.needed, kGranule);
      spare += Bytes{offer.spare.count / kGranule.count * kGranule.count};
    }
    for (const MemoryLoan& loan : match(offers, even(size))) lent += loan.bytes - loan.wanted;
    EXPECT_EQ(lent, std::min(needed, spare));
  }
}

TEST(Matching, nothing_stays_spare_that_a_link_leads_from_to_one_in_need) {
  std::mt19937 random(3);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same cases each time
  for (int round = 0; round < 500; ++round) {
    const std::size_t size = 2 + random() % 8;
    const auto offers = random_offers(random, size, 1);
    Bandwidth bandwidth = even(size);
    for (auto& row : bandwidth) {
      for (double& link : row) link = static_cast<double>(random() % 3);
    }
    const auto loans = match(offers, bandwidth);
    auto given = sums(loans, &MemoryLoan::borrower), lent = sums(loans, &MemoryLoan::lender);
    for (std::size_t lender = 0; lender < size; ++lender) {
      for (std::size_t borrower = 0; borrower < size; ++borrower) {
        if (bandwidth[lender][borrower] <= 0) continue;
        const Bytes lacking = offers[borrower].needed - given[static_cast<int>(borrower)];
        const Bytes left = offers[lender].spare - lent[static_cast<int>(lender)];
        EXPECT_TRUE(lacking <= Bytes{0} || left < kGranule || offers[lender].needed > Bytes{0}) << "round " << round;
      }
    }
  }
}

TEST(Matching, who_has_no_link_leaves_its_share_to_others) {
  const std::vector<MemoryOffer> offers{{"", kGranule * 40, {}}, {"", kGranule * 40, {}}, {"", {}, kGranule * 40}};
  Bandwidth bandwidth = even(3);
  bandwidth[2][0] = 0;
  const auto given = sums(match(offers, bandwidth), &MemoryLoan::borrower);
  EXPECT_FALSE(given.contains(0));
  EXPECT_EQ(given.at(1), kGranule * 40);
}

TEST(Matching, links_of_one_kind_are_alike_however_they_were_measured) {
  std::mt19937 random(4);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same cases each time
  std::uniform_real_distribution<double> noise(0.85, 1.19);  // two of them make less than a factor of the root of two
  const Bandwidth kinds{{0, 1, 0.5, 0}, {1, 0, 1, 0}, {0.25, 1, 0, 0}, {1, 0.125, 1, 0}};
  for (int round = 0; round < 200; ++round) {
    Bandwidth measured = kinds;
    for (auto& row : measured) {
      for (double& link : row) link *= 20 * noise(random);
    }
    EXPECT_EQ(link_classes(measured), kinds);
  }
}

TEST(Matching, what_remains_lacking_is_even) {
  const std::vector<MemoryOffer> offers{
      {"", kGranule * 100, {}}, {"", kGranule * 60, {}}, {"", kGranule * 10, {}}, {"", {}, kGranule * 81}};
  const auto given = sums(match(offers, even(4)), &MemoryLoan::borrower);
  EXPECT_EQ(given.at(0), kGranule * 61);  // 39 lack, and 40, and 10 as ever
  EXPECT_EQ(given.at(1), kGranule * 20);
  EXPECT_FALSE(given.contains(2));
}

TEST(Matching, a_borrower_uses_its_links_in_proportion) {
  const std::vector<MemoryOffer> offers{
      {"", kGranule * 60, {}}, {"", {}, kGranule * 90}, {"", {}, kGranule * 90}, {"", {}, kGranule * 90}};
  Bandwidth bandwidth = even(4);
  bandwidth[1][0] = 3;
  bandwidth[2][0] = 2;
  auto given = sums(match(offers, bandwidth), &MemoryLoan::lender);
  EXPECT_EQ(given[1], kGranule * 30);
  EXPECT_EQ(given[2], kGranule * 20);
  EXPECT_EQ(given[3], kGranule * 10);
  bandwidth[2][0] = 0;
  given = sums(match(offers, bandwidth), &MemoryLoan::lender);
  EXPECT_EQ(given[1], kGranule * 45);
  EXPECT_EQ(given[3], kGranule * 15);
}

TEST(Matching, a_lender_that_has_little_is_made_up_for_by_others) {
  const std::vector<MemoryOffer> offers{{"", kGranule * 60, {}}, {"", {}, kGranule * 10}, {"", {}, kGranule * 90}};
  const auto given = sums(match(offers, even(3)), &MemoryLoan::lender);
  EXPECT_EQ(given.at(1), kGranule * 10);
  EXPECT_EQ(given.at(2), kGranule * 50);
}

TEST(Matching, lenders_share_what_they_have_among_those_who_come) {
  const std::vector<MemoryOffer> offers{
      {"", kGranule * 40, {}}, {"", kGranule * 40, {}}, {"", {}, kGranule * 50}, {"", {}, kGranule * 30}};
  const auto loans = match(offers, even(4));
  const auto given = sums(loans, &MemoryLoan::borrower);
  EXPECT_EQ(given.at(0), kGranule * 40);
  EXPECT_EQ(given.at(1), kGranule * 40);
  EXPECT_EQ(loans.size(), 4U);  // each uses both
}

TEST(Matching, what_is_only_wanted_comes_after_all_needs) {
  const std::vector<MemoryOffer> offers{{"", kGranule * 40, {}, kGranule * 100}, {"", {}, kGranule * 50}};
  const std::vector<MemoryLoan> expected{{1, 0, {}, kGranule * 50, kGranule * 10}};
  EXPECT_EQ(match(offers, even(2)), expected);
}

TEST(Matching, no_stage_lends_to_itself_what_it_wants) {
  const std::vector<MemoryOffer> offers{{"", {}, kGranule * 30, kGranule * 20}, {"", {}, {}, kGranule * 20}};
  const std::vector<MemoryLoan> expected{{0, 1, {}, kGranule * 20, kGranule * 20}};
  EXPECT_EQ(match(offers, even(2)), expected);
}

TEST(Matching, wants_that_exceed_what_is_left_get_the_same_part_of_it) {
  const std::vector<MemoryOffer> offers{
      {"", {}, {}, kGranule * 40}, {"", {}, {}, kGranule * 80}, {"", {}, kGranule * 60}};
  const std::vector<MemoryLoan> expected{{2, 0, {}, kGranule * 20, kGranule * 20},
                                         {2, 1, kGranule * 20, kGranule * 40, kGranule * 40}};
  EXPECT_EQ(match(offers, even(3)), expected);
}

TEST(Matching, one_in_need_does_not_lend) {
  const std::vector<MemoryOffer> offers{{"", kGranule * 4, kGranule * 4}, {"", kGranule * 4, {}}};
  EXPECT_TRUE(match(offers, even(2)).empty());
}

}  // namespace
}  // namespace noria
