// What forwards save goes out and comes back whole on a stream that runs behind the calling thread, whose memory is
// handed out again as soon as it is free, as torch's allocator does; and each kind of wait matters.
#include "engine/saver.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "base/errors.h"
#include "device/host_backend.h"

namespace noria {
namespace {

using namespace std::chrono_literals;

constexpr std::int64_t kFloats = 1024;
constexpr Bytes kBytes{kFloats * static_cast<std::int64_t>(sizeof(float))};
constexpr int kModules = 8;

class Machine final : public Custodian {
 public:
  explicit Machine(Hostility hostility, std::optional<Bytes> room = std::nullopt)
      : backend_(HostBackendOptions{Bytes{1 << 20}, {}, std::move(hostility)}),
        stream_(backend_.create_stream()),
        home_(static_cast<std::size_t>(3 * kModules * kFloats)),
        saver_(issuer_, backend_, *this, room) {}
  ~Machine() override { backend_.close(); }

  void omit(const std::string& kind) { issuer_.hazards().omit(kind); }
  std::vector<std::string> kinds() const { return issuer_.wait_kinds(); }
  const SavedStats& stats() const { return saver_.stats(); }
  Bytes held() const { return saver_.held(); }

  void begin_forward() { saver_.begin_pass(Phase::forward, /*saves=*/true); }
  SavedId forward(int module, float value) {
    (void)saver_.enter(HookId(module), Phase::forward, UnitId(module), stream_);
    float* const block = allocate();
    backend_.enqueue(stream_, [block, value] {
      std::this_thread::sleep_for(1ms);
      std::fill(block, block + kFloats, value);
    });
    const SavedId saved = saver_.save(reinterpret_cast<const std::byte*>(block), kBytes);
    blocks_[saved] = block;
    saver_.leave(UnitId(module), stream_);
    return saved;
  }
  /// The value that the module had saved, once the stream has come so far.
  void backward(int module, SavedId saved, float* value) {
    Op op;
    op.verb = Verb::backward;
    op.unit = UnitId(module);
    op.accesses = saver_.enter(HookId(module), Phase::backward, UnitId(module), stream_);
    auto begun = issuer_.begin(op);
    const Ticket visit = backend_.open(begun.label, {});
    issuer_.keep(op.id, visit);
    backend_.wait(begun.waits, stream_, begun.label);
    saver_.await(saved, stream_);
    const float* const block = blocks_.at(saved);
    backend_.enqueue(stream_, [block, value] {
      std::this_thread::sleep_for(1ms);
      *value = block[0];
      for (std::int64_t i = 1; i < kFloats; ++i) {
        if (block[i] != block[0]) *value = -1;
      }
    });
    backend_.give(visit, stream_);
    saver_.forget(saved);
    saver_.leave(UnitId(module), stream_);
  }
  /// Waits until the stream has come so far.
  void finish() {
    const Ticket now = backend_.open({OpId(), Lane::compute, Verb::user, UnitId()}, {});
    backend_.give(now, stream_);
    now->wait_passed();
  }

  /// What nobody asks for any more.
  void let_go() {
    backend_.idle();
    begin_forward();
    forget(forward(0, 0));
  }
  void forget(SavedId saved) { saver_.forget(saved); }

  // ---- Custodian ----
  void attach(UnitId, std::byte*) override {}
  void evict(UnitId) override {}
  void open_gradients(UnitId, std::byte*) override {}
  void close_gradients(UnitId) override {}
  void home_moved(UnitId, std::byte*) override {}
  void held_moved(UnitId, std::byte*) override {}
  void update(UnitId) override {}
  std::pair<std::byte*, Bytes> more_home(Bytes) override {
    EXPECT_FALSE(std::exchange(has_home_, true));
    return {reinterpret_cast<std::byte*>(home_.data()), kBytes * (3 * kModules)};
  }
  std::byte* make_room(SavedId saved, Bytes) override {
    blocks_[saved] = allocate();
    return reinterpret_cast<std::byte*>(blocks_[saved]);
  }
  void fill(SavedId saved, const std::byte* from, Bytes bytes) override {
    finish();
    std::memcpy(blocks_.at(saved), from, static_cast<std::size_t>(bytes.count));
  }
  void left(SavedId saved) override {
    const auto found = blocks_.find(saved);
    if (found == blocks_.end()) return;
    free_.push_back(found->second);
    blocks_.erase(found);
  }

 private:
  // What was freed last is what the stream is still busy with: it comes first.
  float* allocate() {
    if (free_.empty()) {
      memory_.push_back(std::make_unique<std::vector<float>>(kFloats));
      free_.push_back(memory_.back()->data());
    }
    float* const block = free_.back();
    free_.pop_back();
    return block;
  }

  std::vector<std::unique_ptr<std::vector<float>>> memory_;
  std::vector<float*> free_;
  std::map<SavedId, float*> blocks_;
  HostBackend backend_;
  const Stream stream_;
  BufferTable buffers_;
  Issuer issuer_{backend_, buffers_};
  std::vector<float> home_;
  bool has_home_ = false;
  Saver saver_;
};

/// How many values came back wrong.
int count_wrong(Machine& machine, bool in_order) {
  int num_wrong = 0;
  for (int step = 0; step < 3; ++step) {
    std::vector<std::vector<SavedId>> saved;
    std::vector<float> found(static_cast<std::size_t>(2 * kModules), -2);
    for (int forward = 0; forward < 2; ++forward) {
      machine.begin_forward();
      saved.emplace_back();
      for (int module = 0; module < kModules; ++module) {
        saved.back().push_back(machine.forward(module, static_cast<float>(100 * step + 10 * forward + module)));
      }
    }
    for (int nth = 0; nth < 2; ++nth) {
      const int forward = in_order ? nth : 1 - nth;
      for (int module = kModules - 1; module >= 0; --module) {
        machine.backward(module, saved[static_cast<std::size_t>(forward)][static_cast<std::size_t>(module)],
                         &found[static_cast<std::size_t>(kModules * forward + module)]);
      }
    }
    machine.finish();
    for (int i = 0; i < 2 * kModules; ++i) {
      const int value = 100 * step + 10 * (i / kModules) + i % kModules;
      num_wrong += found[static_cast<std::size_t>(i)] == static_cast<float>(value) ? 0 : 1;
    }
  }
  return num_wrong;
}

TEST(Saver, what_was_saved_comes_back_whatever_is_late) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    for (const bool in_order : {true, false}) {
      Machine machine(Hostility{seed, 300, {}, false});
      EXPECT_EQ(count_wrong(machine, in_order), 0) << "seed " << seed;
      EXPECT_GT(machine.stats().num_offloaded, 30);
      EXPECT_GT(machine.stats().num_reloaded, 30);
      if (in_order) EXPECT_EQ(machine.stats().num_unforeseen, 0);
      else EXPECT_GT(machine.stats().num_unforeseen, 0);
      machine.let_go();
      EXPECT_EQ(machine.held(), Bytes{0});
    }
  }
}

TEST(Saver, a_room_is_filled_and_never_exceeded) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    std::int64_t num_offloaded = 3 * 2 * kModules;
    for (const int bundles : {2, 3, 5, 8, 12, 16}) {
      Machine machine(Hostility{seed, 300, {}, false}, kBytes * bundles);
      EXPECT_EQ(count_wrong(machine, /*in_order=*/true), 0) << bundles << " bundles, seed " << seed;
      EXPECT_EQ(machine.stats().most_there, kBytes * bundles);
      EXPECT_EQ(machine.stats().num_unforeseen, 0);
      EXPECT_LE(machine.stats().num_offloaded, num_offloaded);
      num_offloaded = machine.stats().num_offloaded;
    }
    EXPECT_EQ(num_offloaded, 0);
  }
}

TEST(Saver, a_wrong_guess_costs_no_bit) {
  for (const int bundles : {2, 5}) {
    Machine machine(Hostility{1, 300, {}, false}, kBytes * bundles);
    EXPECT_EQ(count_wrong(machine, /*in_order=*/false), 0);
    EXPECT_GT(machine.stats().num_unforeseen, 0);
  }
}

TEST(Saver, a_room_for_less_than_two_bundles_is_refused) {
  Machine machine(Hostility{}, kBytes + kBytes - Bytes{1});
  machine.begin_forward();
  (void)machine.forward(0, 1.0F);
  EXPECT_THROW((void)machine.forward(1, 1.0F), UsageError);
}

TEST(Saver, each_kind_of_wait_matters) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "without its waits it races, on purpose";
#endif
  for (const std::string kind : {"save -> offload on saved_tensor (RAW)", "save -> reload on saved_tensor (WAW)",
                                 "reload -> backward on saved_tensor (RAW)"}) {
    Hostility hostility;
    hostility.seed = 1;
    if (kind.starts_with("reload")) hostility.hold_us = {{Verb::reload, 20'000}};
    Machine machine(hostility);
    machine.omit(kind);
    EXPECT_GT(count_wrong(machine, /*in_order=*/true), 0) << kind;
  }
  Machine machine(Hostility{});
  EXPECT_EQ(count_wrong(machine, true), 0);
  for (const std::string& kind : machine.kinds()) {
    const bool is_known =
        kind == "save -> offload on saved_tensor (RAW)" || kind == "save -> reload on saved_tensor (WAW)" ||
        kind == "reload -> backward on saved_tensor (RAW)" ||
        // Redundant: nothing is reloaded, and no token is handed on, before its copy is over.
        kind == "offload -> save on saved_tensor (WAR)" || kind == "backward -> save on saved_tensor (WAR)" ||
        kind == "offload -> save on saved_tensor (WAW)";
    EXPECT_TRUE(is_known) << kind;
  }
}

}  // namespace
}  // namespace noria
