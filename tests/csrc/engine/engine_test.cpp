// Short training programs with every thread there is, for the sanitizers: a compute stream, the lanes, the pool, a
// hostile backend. That the bits are right is tested from Python against a twin; here a quiet run is the twin.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <memory>
#include <string>
#include <vector>

#include "bare_engine.h"
#include "base/errors.h"
#include "device/host_backend.h"

namespace noria {
namespace {

const std::vector<BareUnit> kUnits{{2, 2}, {3, 1}, {1, 0}, {4, 4}};
const std::vector<std::vector<UnitId>> kLayers{
    {UnitId(0)}, {UnitId(1)}, {UnitId(2)}, {UnitId(3)}, {UnitId(0), UnitId(2)}};

Hostility hostility(std::uint64_t seed) {
  Hostility late{seed, 200, {}, true};
  return seed == 0 ? Hostility{} : late;
}

std::unique_ptr<BareEngine> make(std::uint64_t seed, Bytes arena, bool drafts = false) {
  HostOptimizerOptions options;
  options.num_threads = 2;
  options.pace = slow(hostility(seed));
  return std::make_unique<BareEngine>(kUnits, make_host_machine(hostility(seed), /*asynchronous=*/true),
                                      Budget{arena, 0}, /*prefetch_at_step=*/true,
                                      std::make_shared<HostOptimizer>(options), drafts);
}

void forward(BareEngine& model) {
  model.begin_forward(0, true, true);
  for (std::size_t layer = 0; layer < kLayers.size(); ++layer) {
    model.visit(static_cast<std::int32_t>(layer), kLayers[layer]);
  }
  model.end_pass();
}

void backward_layer(BareEngine& model, std::size_t layer) {
  model.visit(static_cast<std::int32_t>(layer), kLayers[layer]);
  for (UnitId unit : kLayers[layer]) {
    const auto index = static_cast<std::size_t>(unit.value);
    for (int slot = 0; slot < kUnits[index].num_trainable; ++slot)
      model.gradient(index, static_cast<std::size_t>(slot));
  }
}

void backward(BareEngine& model) {
  model.begin_backward();
  for (std::size_t layer = kLayers.size(); layer-- > 0;) backward_layer(model, layer);
  model.end_pass();
}

// Two micro-batches, a clip, updates on the pool and on this thread, an edit after the step, a look at the home.
void step(BareEngine& model, bool blocking, bool clips = true) {
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    forward(model);
    model.expect_updates(0.05);
    backward(model);
  }
  if (clips) model.clip(0, 1);
  model.begin_step();
  for (std::size_t unit = 0; unit < kUnits.size(); ++unit) model.update(unit, /*on_pool=*/unit != 1);
  model.end_step(blocking);
  model.clip(3, 2);
  (void)model.read_home(0);
  model.zero_grad();
}

void train(BareEngine& model) {
  step(model, false);
  forward(model);
  model.begin_backward();
  backward_layer(model, 4);
  backward_layer(model, 3);
  model.reset();  // it raised
  model.zero_grad();
  step(model, true);
  model.write_home(3, 0.25F);
  step(model, false);
  for (int plain = 0; plain < 3; ++plain) step(model, false, /*clips=*/false);
  model.idle();
}

class UnderDelays : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(UnderDelays, a_hostile_run_in_a_small_window_gives_the_bits_of_a_quiet_one_in_a_large) {
  auto quiet = make(0, Bytes{1 << 16});
  auto hostile = make(GetParam(), kSlotBytes * 8, /*drafts=*/true);
  train(*quiet);
  train(*hostile);
  for (std::size_t unit = 0; unit < kUnits.size(); ++unit) {
    EXPECT_EQ(quiet->result(unit), hostile->result(unit));
    for (const char* which : {"weights", "moment1", "moment2"}) {
      EXPECT_EQ(quiet->array(which, unit), hostile->array(which, unit)) << which << " of unit " << unit;
    }
  }
  EXPECT_GT(hostile->engine().drafts()->counts().kept, 0);
  EXPECT_GT(hostile->engine().fetcher()->num_fetches(), quiet->engine().fetcher()->num_fetches());
  quiet->close();
  hostile->close();
}

TEST_P(UnderDelays, a_hostile_run_with_units_at_a_peer_gives_the_bits_of_a_quiet_one_without) {
  auto quiet = make(0, Bytes{1 << 16});
  auto hostile = make(GetParam(), kSlotBytes * 8, /*drafts=*/true);
  hostile->lend(kSlotBytes * 9);
  hostile->keep_copies({UnitId(3), UnitId(1), UnitId(2), UnitId(0)});  // the last one has no room
  train(*quiet);
  train(*hostile);
  for (std::size_t unit = 0; unit < kUnits.size(); ++unit) {
    EXPECT_EQ(quiet->result(unit), hostile->result(unit));
    EXPECT_EQ(quiet->array("weights", unit), hostile->array("weights", unit));
  }
  EXPECT_EQ(hostile->engine().copies()->stats().num_units, 3);
  EXPECT_GT(hostile->engine().copies()->stats().num_fetched, 0);
  quiet->close();
  hostile->close();
}

TEST(engine, copies_have_passed_when_the_peer_gets_its_memory_back) {
  Hostility late;
  late.hold_us[Verb::stash] = late.hold_us[Verb::fetch] = 20'000;
  BareEngine model(kUnits, make_host_machine(late, /*asynchronous=*/true), Budget{kSlotBytes * 8, 0},
                   /*prefetch_at_step=*/true, std::make_shared<HostOptimizer>(HostOptimizerOptions{}));
  model.lend(kSlotBytes * 10);
  model.keep_copies({UnitId(0), UnitId(1), UnitId(2), UnitId(3)});
  forward(model);
  forward(model);
  model.shrink_copies(Bytes{0});
  const CopyStats stats = model.engine().copies()->stats();
  EXPECT_GT(stats.num_stashed, 0);
  EXPECT_EQ(model.backend().stats(Lane::peer).bytes, stats.stashed + stats.fetched);
  model.close();
}

INSTANTIATE_TEST_SUITE_P(seeds, UnderDelays, ::testing::Values(1, 2, 3));

TEST(engine, closes_in_the_middle_of_a_pass_while_every_lane_has_work) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    auto model = make(seed, kSlotBytes * 8);
    step(*model, false);
    forward(*model);
    model->begin_backward();
    backward_layer(*model, 4);
    if (seed % 2 == 0) model->close();
    // else: dropped as it is
  }
}

TEST(engine, an_update_that_fails_is_thrown_and_leaves_no_thread_waiting) {
  auto model = make(1, kSlotBytes * 8);
  step(*model, false);
  forward(*model);
  backward(*model);
  model->begin_step();
  model->fail_next_update();
  model->update(1, /*on_pool=*/false);
  EXPECT_THROW(model->end_step(/*blocking=*/true), MachineError);
  model->close();
}

// The failure shows when the stream is released.
void begin_step_behind_a_broken_kernel(BareEngine& model) {
  step(model, false);
  model.hold_stream();
  model.break_stream();
  forward(model);
  backward(model);
  model.begin_step();
}

TEST(engine, a_kernel_that_fails_raises_in_the_thread_that_waits_for_it) {
  auto model = make(1, kSlotBytes * 8);
  begin_step_behind_a_broken_kernel(*model);
  model->update(0, /*on_pool=*/true);
  model->release_stream();
  EXPECT_THROW(model->idle(), MachineError);
  model->close();
}

TEST(engine, a_deferred_update_whose_gradient_never_came_is_not_made_and_leaves_its_unit_torn) {
  auto model = make(1, kSlotBytes * 8);
  begin_step_behind_a_broken_kernel(*model);
  model->update(1, /*on_pool=*/false);
  model->release_stream();
  const std::vector<float> before = model->array("weights", 1);
  EXPECT_THROW(model->end_step(/*blocking=*/true), MachineError);
  EXPECT_NE(model->engine().torn().find("broke off (a kernel failed)"), std::string::npos) << model->engine().torn();
  model->engine().run_all_deferred();
  EXPECT_EQ(model->array("weights", 1), before);
  model->close();
}

/// Throws in the next fetch, once.
class BrokenFetch final : public Pace {
 public:
  std::int64_t before_us(Lane lane, Verb /*verb*/) override {
    if (lane == Lane::fetch && armed.exchange(false)) throw MachineError("a copy failed");
    return 0;
  }
  std::atomic<bool> armed = false;
};

TEST(engine, a_copy_that_has_failed_is_made_again_before_anything_uses_it) {
  const auto pace = std::make_shared<BrokenFetch>();
  const auto backend = std::make_shared<HostBackend>(HostBackendOptions{Bytes{1 << 24}, pace});
  BareEngine model(kUnits, {backend, {}, {}, [](Stream, const auto& work) { work(); }}, Budget{kSlotBytes * 8, 0},
                   /*prefetch_at_step=*/true, std::make_shared<HostOptimizer>(HostOptimizerOptions{}));
  for (int pass = 0; pass < 3; ++pass) forward(model);  // from here on units take each other's memory
  pace->armed = true;
  EXPECT_THROW(forward(model), MachineError);
  model.reset();
  model.engine().idle();  // the caller has heard of it
  std::vector<std::vector<std::uint32_t>> expected;
  for (std::size_t unit = 0; unit < kUnits.size(); ++unit) {
    expected.push_back(model.result(unit));
    const std::vector<float> weights = model.array("weights", unit);
    for (const std::vector<UnitId>& needs : kLayers) {
      if (std::find(needs.begin(), needs.end(), UnitId(static_cast<std::int32_t>(unit))) == needs.end()) continue;
      for (std::size_t i = 0; i < weights.size(); ++i) {
        expected[unit][i] = expected[unit][i] * 1664525U + std::bit_cast<std::uint32_t>(weights[i]) + 1013904223U;
      }
    }
  }
  forward(model);
  for (std::size_t unit = 0; unit < kUnits.size(); ++unit) EXPECT_EQ(model.result(unit), expected[unit]) << unit;
  model.close();
}

}  // namespace
}  // namespace noria
