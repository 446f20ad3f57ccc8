// Room plan without Python, so that sanitizers see it: random models larger than the Python tests use, and long
// streams.
#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/errors.h"
#include "plan/hazards.h"
#include "plan/planner.h"

namespace noria {
namespace {

constexpr Place kDevice{Place::Kind::device, 0};
constexpr Place kHost{Place::Kind::host, 0};

struct RandomModel {
  BufferTable buffers;
  UnitMap<UnitFacts> units;
  std::vector<Visit> forward;
  std::vector<Visit> backward;

  RandomModel(std::mt19937& random, int num_units, int num_visits) : units(static_cast<std::size_t>(num_units)) {
    std::uniform_int_distribution<int> cells(1, 9);
    std::uniform_int_distribution<int> any_unit(0, num_units - 1);
    Bytes end;
    const auto home = [&](Bytes bytes, Purpose purpose, UnitId unit) {
      const BufferId id = buffers.intern({kHost, end, bytes, Format::travel, purpose, unit});
      end += bytes;
      return id;
    };
    for (UnitId unit : units.ids()) {
      const Bytes weights = kTensorAlignment * cells(random);
      const Bytes gradients = cells(random) < 3 ? Bytes{0} : kTensorAlignment * cells(random);
      units[unit] = {"unit" + std::to_string(unit.value),
                     weights,
                     gradients,
                     home(weights, Purpose::working_copy, unit),
                     home(std::max(gradients, Bytes{1}), Purpose::held_gradient, unit),
                     home(weights * 2, Purpose::optimizer_state, unit)};
    }
    for (int i = 0; i < num_visits; ++i) {
      Visit visit{HookId(i), Phase::forward, {UnitId(i % num_units)}, {}};
      if (cells(random) < 3) visit.needs.emplace_back(any_unit(random));
      std::sort(visit.needs.begin(), visit.needs.end());
      visit.needs.erase(std::unique(visit.needs.begin(), visit.needs.end()), visit.needs.end());
      forward.push_back(visit);
      visit.phase = Phase::backward;
      for (UnitId unit : visit.needs) {
        if (units[unit].gradients > Bytes{0}) visit.gradients.push_back(unit);
      }
      backward.insert(backward.begin(), visit);
    }
  }
};

// What an engine's arena would say: it throws at a range that leaves the arena or overlaps a live one.
class Arena {
 public:
  explicit Arena(Bytes bytes) : bytes_(bytes) {}
  void take(const Lease& lease) {
    ASSERT_LE(lease.offset + lease.bytes, bytes_);
    for (const Lease& other : live_) {
      ASSERT_TRUE(lease.offset + lease.bytes <= other.offset || other.offset + other.bytes <= lease.offset);
    }
    live_.push_back(lease);
  }
  void end_until(std::int64_t op) {
    std::erase_if(live_, [&](const Lease& lease) { return lease.last_op >= 0 && lease.last_op < op; });
  }

 private:
  Bytes bytes_;
  std::vector<Lease> live_;
};

TEST(Planner, leases_never_overlap_and_derived_waits_are_proven) {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    const int num_units = std::uniform_int_distribution<int>(1, 30)(random);
    RandomModel model(random, num_units, num_units + round % 7);
    const Budget smallest = smallest_budget(model.backward, model.units);
    Budget budget{smallest.arena + kTensorAlignment * std::uniform_int_distribution<int>(0, 40)(random), 0};
    if (round % 3 == 0) budget.window = smallest.window + round % 4;
    std::vector<Resident> entry;
    std::vector<Op> ops;
    for (const auto& [visits, next] : {std::pair(model.forward, model.backward), {model.backward, model.forward}}) {
      const PassPlan plan = plan_pass({kDevice, budget, visits, next, entry}, model.units, model.buffers);
      entry = plan.exit;
      Arena arena(budget.arena);
      for (const Lease& lease : plan.leases) {
        arena.end_until(std::max<std::int64_t>(lease.first_op, 0));
        arena.take(lease);
      }
      ASSERT_LE(plan.peak, budget.arena);
      ASSERT_LE(plan.peak_units, budget.window > 0 ? budget.window : num_units);
      ops.insert(ops.end(), plan.ops.begin(), plan.ops.end());
    }
    const WaitList waits = derive(ops, model.buffers);
    EXPECT_EQ(check(ops, waits, model.buffers), std::vector<std::string>{});
  }
}

TEST(Hazards, long_stream_over_changing_ranges_is_remembered_by_its_ranges_only) {
  BufferTable buffers;
  std::vector<BufferId> ranges;
  for (std::int64_t first = 0; first < 24; ++first) {
    for (std::int64_t cells = 1; cells < 5; ++cells) {
      ranges.push_back(buffers.intern(
          {kDevice, kTensorAlignment * first, kTensorAlignment * cells, Format::compute, Purpose::weights, UnitId(0)}));
    }
  }
  constexpr std::int64_t kCells = 28;
  constexpr std::int64_t kChains = 5;
  std::mt19937 random(11);
  Hazards hazards(buffers, /*assists=*/false);
  for (std::int64_t i = 0; i < 20000; ++i) {
    Op op;
    op.id = OpId(i);
    op.lane = static_cast<Lane>(random() % kChains);
    op.verb = Verb::fetch;
    for (int k = 0; k < 3; ++k) {
      const auto mode = random() % 2 == 0 ? Access::Mode::read : Access::Mode::write;
      op.accesses.push_back({ranges[random() % ranges.size()], 0, mode});
    }
    hazards.issue(op);
    ASSERT_LE(hazards.num_remembered(), static_cast<std::size_t>(kCells + kCells * (1 + kChains)));
  }
}

TEST(BufferTable, equal_buffers_have_equal_ids_and_others_have_not) {
  BufferTable table;
  const Buffer buffer{kDevice, Bytes{512}, Bytes{1024}, Format::compute, Purpose::weights, UnitId(3)};
  const BufferId id = table.intern(buffer);
  EXPECT_EQ(table.intern(buffer), id);
  EXPECT_EQ(table[id], buffer);
  std::vector<Buffer> others(6, buffer);
  others[0].place = kHost;
  others[1].offset = Bytes{0};
  others[2].bytes = Bytes{512};
  others[3].format = Format::travel;
  others[4].purpose = Purpose::gradient_buffer;
  others[5].unit = UnitId(4);
  for (const Buffer& other : others) EXPECT_NE(table.intern(other), id);
  EXPECT_EQ(table.size(), 7U);
}

}  // namespace
}  // namespace noria
