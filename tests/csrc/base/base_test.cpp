// Room base: what the Python tests cannot reach, and traces under the sanitizers.
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/errors.h"
#include "base/trace.h"
#include "base/words.h"

namespace noria {
namespace {

TEST(Errors, broken_invariant_says_what_is_wrong_and_names_its_condition_and_place) {
  const int num_leases = 3;
  try {
    NORIA_INVARIANT(num_leases == 2, std::to_string(num_leases) + " leases");
    FAIL() << "the invariant was not checked";
  } catch (const InvariantError& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.find("3 leases (num_leases == 2 does not hold at tests/csrc/base/base_test.cpp:"), 0U) << text;
  }
}

TEST(Errors, kept_invariant_does_not_evaluate_its_detail) {
  bool evaluated = false;
  NORIA_INVARIANT(true, (evaluated = true, "detail"));
  EXPECT_FALSE(evaluated);
}

TEST(Bytes, aligned_amount_is_the_smallest_multiple_that_holds_it) {
  for (std::int64_t count = 0; count < 3000; ++count) {
    const std::int64_t aligned = align_up(Bytes{count}, kTensorAlignment).count;
    EXPECT_EQ(aligned % 512, 0);
    EXPECT_GE(aligned, count);
    EXPECT_LT(aligned - count, 512);
  }
}

TEST(Words, every_word_is_said_as_it_is_written_and_understood_again) {
  EXPECT_EQ(to_string(Lane::compute), "compute");
  EXPECT_EQ(to_string(Lane::fetch), "fetch");
  EXPECT_EQ(to_string(Lane::drain), "drain");
  EXPECT_EQ(to_string(Lane::collect), "collect");
  EXPECT_EQ(to_string(Lane::peer), "peer");
  EXPECT_EQ(to_string(Lane::update), "update");
  EXPECT_EQ(to_string(Verb::forward), "forward");
  EXPECT_EQ(to_string(Verb::backward), "backward");
  EXPECT_EQ(to_string(Verb::user), "user");
  EXPECT_EQ(to_string(Verb::fetch), "fetch");
  EXPECT_EQ(to_string(Verb::drain), "drain");
  EXPECT_EQ(to_string(Verb::update), "update");
  EXPECT_EQ(to_string(Verb::evict), "evict");
  EXPECT_EQ(to_string(Verb::poison), "poison");
  EXPECT_EQ(to_string(Verb::load), "load");
  EXPECT_EQ(to_string(Phase::forward), "forward");
  EXPECT_EQ(to_string(Phase::backward), "backward");
  for (int i = 0; i < kNumLanes; ++i) EXPECT_EQ(parse_lane(to_string(static_cast<Lane>(i))), static_cast<Lane>(i));
  for (int i = 0; i < kNumVerbs; ++i) EXPECT_EQ(parse_verb(to_string(static_cast<Verb>(i))), static_cast<Verb>(i));
  for (Phase phase : {Phase::forward, Phase::backward}) EXPECT_EQ(parse_phase(to_string(phase)), phase);
  EXPECT_THROW(parse_lane("evict"), UsageError);
}

TEST(Trace, spans_are_added_read_and_cleared_from_many_threads_at_once) {
  Trace trace(100);
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&trace, i] {
      for (std::int64_t op = 0; op < 200; ++op) {
        trace.add({OpId(op), static_cast<Lane>(i), Verb::fetch, UnitId(0), op, op + 1, Bytes{1}, {OpId(op - 1)}});
        if (op % 50 == 0) trace.chrome_json({"a"});
        if (op % 77 == 0) trace.clear();
      }
    });
  }
  threads.clear();
  EXPECT_LE(trace.spans().size(), 100U);
}

}  // namespace
}  // namespace noria
