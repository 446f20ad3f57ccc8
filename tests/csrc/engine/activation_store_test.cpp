// What forwards save goes out and comes back whole on a stream that runs behind the calling thread, whose memory is
// handed out again as soon as it is free, as torch's allocator does; and each kind of wait matters.
#include "engine/activation_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <thread>

#include "base/errors.h"
#include "device/host_backend.h"
#include "testing/slow_pace.h"

namespace noria {
namespace {

using namespace std::chrono_literals;

constexpr Bytes kBytes{4096}, kLarge{600 << 10};
constexpr int kModules = 8;

struct Setting {
  std::uint64_t seed = 0;  // 0: nothing is late
  std::int64_t hold_reloads_us = 0, hold_offloads_us = 0;
  std::optional<Bytes> room = std::nullopt;
  std::vector<int> peers = {};  // how many blocks each lends
  Bytes block = kBytes;
  int home_blocks = 3 * kModules;
};

Hostility hostility_of(const Setting& setting) {
  Hostility hostility;
  hostility.seed = setting.seed;
  hostility.max_delay_us = setting.hold_reloads_us + setting.hold_offloads_us > 0 ? 0 : 300;
  if (setting.hold_reloads_us > 0) hostility.hold_us[Verb::reload] = setting.hold_reloads_us;
  if (setting.hold_offloads_us > 0) hostility.hold_us[Verb::offload] = setting.hold_offloads_us;
  return hostility;
}

class Machine final : public EngineCallbacks {
 public:
  explicit Machine(const Setting& setting)
      : block_(setting.block),
        num_floats_(setting.block.count / static_cast<std::int64_t>(sizeof(float))),
        backend_(HostBackendOptions{Bytes{1 << 20}, slow(hostility_of(setting))}),
        lender_(HostBackendOptions{setting.block * 1000}),
        stream_(backend_.create_stream()),
        home_(static_cast<std::size_t>(setting.home_blocks * num_floats_)),
        activations_(issuer_, backend_, *this, [this](Bytes least) { return more_home(least); }, setting.room) {
    for (const int num_blocks : setting.peers) {
      std::byte* const memory = lender_.allocate_shared(block_ * num_blocks);
      const SharedMemory told = lender_.shared(memory);
      activations_.add_peer({num_peers_, num_peers_, 1.0 + num_peers_, backend_.open_shared(told), told.bytes});
      lent_.push_back({memory, told.bytes});
      ++num_peers_;
    }
  }
  ~Machine() override { backend_.close(); }

  void omit(const std::string& kind) { issuer_.hazards().omit(kind); }
  std::vector<std::string> kinds() const { return issuer_.wait_kinds(); }
  const SavedStats& stats() const { return activations_.stats(); }
  Bytes held() const { return activations_.held(); }
  void set_room(Bytes room) { activations_.set_room(room); }
  void resize_room(Bytes room) { activations_.resize_room(room); }

  /// Memory of rank 1, as its owner sees it.
  std::byte* borrow(Bytes bytes) {
    std::byte* const memory = lender_.allocate_shared(bytes);
    activations_.add_peer({1, 0, 1, backend_.open_shared(lender_.shared(memory)), bytes});
    return memory;
  }
  /// How many bytes of what a peer lends are not zero any more.
  std::int64_t count_written(int peer) const {
    const auto [memory, bytes] = lent_[static_cast<std::size_t>(peer)];
    return bytes.count - std::count(memory, memory + bytes.count, std::byte{0});
  }
  Bytes copied() const { return backend_.stats(Lane::peer).bytes; }
  bool shrink_peer(Bytes left) { return activations_.shrink_peer(1, left); }

  void send_home(std::set<HookId> hooks) { activations_.send_home(std::move(hooks)); }
  std::int64_t take_waited_us() { return activations_.take_waited_us(); }

  /// What is to come back waits until the ticket is given.
  Ticket hold_fetches() {
    backend_.idle();
    const Ticket until = backend_.open({OpId(), Lane::compute, Verb::user, UnitId()}, {});
    (void)backend_.submit({OpId(), Lane::fetch, Verb::fetch, UnitId()}, {}, {until});
    return until;
  }
  void idle() { backend_.idle(); }
  void let_fetches_go(const Ticket& until) {
    backend_.give(until, Stream());
    backend_.idle();
  }
  /// A visit that gets no further.
  void enter_backward(int module) {
    (void)activations_.enter(HookId(module), Phase::backward, UnitId(module), stream_);
  }
  void reset() { activations_.leave(UnitId(), stream_); }
  bool is_on_device(SavedId saved) const { return blocks_.contains(saved); }

  /// A visit that saves several storages, each of the first bytes of a block; what is in them is their value.
  std::vector<SavedId> forward_many(int module, const std::vector<Bytes>& sizes, float value) {
    (void)activations_.enter(HookId(module), Phase::forward, UnitId(module), stream_);
    std::vector<SavedId> saved;
    for (const Bytes bytes : sizes) {
      float* const block = allocate();
      backend_.enqueue(stream_, [block, value, count = num_floats_] { std::fill(block, block + count, value); });
      saved.push_back(activations_.save(reinterpret_cast<const std::byte*>(block), bytes));
      blocks_[saved.back()] = block;
    }
    activations_.leave(UnitId(module), stream_);
    return saved;
  }
  /// How many of the visit's storages have not come back with this value.
  int count_wrong_of(int module, const std::vector<SavedId>& saved, const std::vector<Bytes>& sizes, float value) {
    float first = -2;
    std::vector<float> found(saved.size(), -2);
    backward(module, saved.front(), &first, [&] {
      for (std::size_t i = 0; i < saved.size(); ++i) {
        const float* const block = blocks_.at(saved[i]);
        const auto count = static_cast<std::size_t>(sizes[i].count) / sizeof(float);
        backend_.enqueue(stream_, [block, count, &each = found[i]] {
          each = std::all_of(block, block + count, [block](float one) { return one == block[0]; }) ? block[0] : -1;
        });
      }
    });
    finish();
    for (const SavedId each : saved) {
      if (each != saved.front()) forget(each);
    }
    return static_cast<int>(std::count_if(found.begin(), found.end(), [&](float each) { return each != value; }));
  }

  void begin_forward() { activations_.begin_pass(Phase::forward, /*saves=*/true); }
  SavedId forward(int module, float value) {
    (void)activations_.enter(HookId(module), Phase::forward, UnitId(module), stream_);
    float* const block = allocate();
    // A kernel that takes time, so that the stream runs behind the host. No result depends on how much.
    backend_.enqueue(stream_, [block, value, count = num_floats_] {
      std::this_thread::sleep_for(1ms);
      std::fill(block, block + count, value);
    });
    const SavedId saved = activations_.save(reinterpret_cast<const std::byte*>(block), block_);
    blocks_[saved] = block;
    activations_.leave(UnitId(module), stream_);
    return saved;
  }
  /// The value that the module had saved, once the stream has come so far.
  void backward(int module, SavedId saved, float* value, const std::function<void()>& also = [] {}) {
    Op op;
    op.verb = Verb::backward;
    op.unit = UnitId(module);
    op.accesses = activations_.enter(HookId(module), Phase::backward, UnitId(module), stream_);
    op.accesses.push_back({weights_, 0, Access::Mode::read});
    auto begun = issuer_.begin(op);
    const Ticket visit = backend_.open(begun.label, {});
    issuer_.keep(op.id, visit);
    backend_.wait(begun.waits, stream_, begun.label);
    activations_.opened(0);
    activations_.await(saved, stream_);
    also();
    const float* const block = blocks_.at(saved);
    // As in `forward`: a kernel that takes time.
    backend_.enqueue(stream_, [block, value, count = num_floats_] {
      std::this_thread::sleep_for(1ms);
      *value = block[0];
      for (std::int64_t i = 1; i < count; ++i) {
        if (block[i] != block[0]) *value = -1;
      }
    });
    backend_.give(visit, stream_);
    last_visit_ = op.id;
    activations_.forget(saved);
    activations_.leave(UnitId(module), stream_);
  }
  /// Whether weights that a peer keeps, and that come now to where the last visit read its own, wait for that one.
  bool is_last_visit_waited_for() {
    Op op;
    op.lane = Lane::peer;
    op.verb = Verb::fetch;
    op.accesses = {{weights_, 0, Access::Mode::write}};
    const auto begun = issuer_.begin(op);
    issuer_.keep(op.id, backend_.submit(begun.label, {}, begun.waits));
    return std::any_of(begun.waits.begin(), begun.waits.end(),
                       [this](const Ticket& ticket) { return ticket->label.op == last_visit_; });
  }
  /// Waits until the stream has come so far.
  void finish() {
    const Ticket now = backend_.open({OpId(), Lane::compute, Verb::user, UnitId()}, {});
    backend_.give(now, stream_);
    now->wait_passed();
  }

  void visit_head() {
    (void)activations_.enter(HookId(kModules), Phase::forward, UnitId(), stream_);
    activations_.leave(UnitId(), stream_);
  }
  /// Drops what is not asked for any more.
  void let_go() {
    backend_.idle();
    begin_forward();
    forget(forward(0, 0));
  }
  void forget(SavedId saved) { activations_.forget(saved); }
  void add_peer(int rank) { activations_.add_peer({rank, 0, 1.0, nullptr, Bytes{0}}); }

  // ---- EngineCallbacks ----
  void attach(UnitId, std::byte*) override {}
  bool evict(UnitId) override { return true; }
  void open_gradients(UnitId, std::byte*) override {}
  void close_gradients(UnitId, bool) override {}
  Ranges held_gradients(UnitId) const override { return {}; }
  void held_moved(UnitId, std::byte*) override {}
  void update(UnitId) override {}
  Stream current_stream() const override { return Stream(); }
  std::pair<std::byte*, Bytes> more_home(Bytes) override {
    EXPECT_FALSE(std::exchange(has_home_, true));
    return {reinterpret_cast<std::byte*>(home_.data()), Bytes{static_cast<std::int64_t>(home_.size() * sizeof(float))}};
  }
  std::byte* make_room(SavedId saved, Bytes) override {
    blocks_[saved] = allocate();
    return reinterpret_cast<std::byte*>(blocks_[saved]);
  }
  void fill(SavedId saved, const std::byte* from, Bytes bytes) override {
    finish();
    std::memcpy(blocks_.at(saved), from, static_cast<std::size_t>(bytes.count));
  }
  void release_saved(SavedId saved) override {
    const auto found = blocks_.find(saved);
    if (found == blocks_.end()) return;
    free_.push_back(found->second);
    blocks_.erase(found);
  }

 private:
  // What was freed last is what the stream is still busy with: it comes first.
  float* allocate() {
    if (free_.empty()) {
      memory_.push_back(std::make_unique<std::vector<float>>(num_floats_));
      free_.push_back(memory_.back()->data());
    }
    float* const block = free_.back();
    free_.pop_back();
    return block;
  }

  std::vector<std::unique_ptr<std::vector<float>>> memory_;
  std::vector<float*> free_;
  std::map<SavedId, float*> blocks_;
  const Bytes block_;
  const std::int64_t num_floats_;
  HostBackend backend_, lender_;
  const Stream stream_;
  BufferTable buffers_;
  Issuer issuer_{backend_, buffers_, /*assists=*/false};
  std::vector<float> home_;
  bool has_home_ = false;
  const BufferId weights_ =
      buffers_.intern({{Place::Kind::device, 0}, Bytes{0}, kBytes, Format::compute, Purpose::weights, UnitId()});
  OpId last_visit_;
  int num_peers_ = 0;
  std::vector<std::pair<const std::byte*, Bytes>> lent_;
  ActivationStore activations_;
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

/// As a pipeline's first stage has it: a backward of the oldest forward, then another forward, and so on.
int count_wrong_in_turn(Machine& machine) {
  constexpr int kForwards = 8, kInFlight = 3;
  std::vector<std::vector<SavedId>> saved;
  std::vector<float> found(static_cast<std::size_t>(kForwards * kModules), -2);
  const auto go_back = [&](int forward) {
    for (int module = kModules - 1; module >= 0; --module) {
      machine.backward(module, saved[static_cast<std::size_t>(forward)][static_cast<std::size_t>(module)],
                       &found[static_cast<std::size_t>(kModules * forward + module)]);
    }
  };
  for (int forward = 0; forward < kForwards; ++forward) {
    if (forward >= kInFlight) go_back(forward - kInFlight);
    machine.begin_forward();
    saved.emplace_back();
    for (int module = 0; module < kModules; ++module) {
      saved.back().push_back(machine.forward(module, static_cast<float>(10 * forward + module)));
    }
  }
  for (int forward = kForwards - kInFlight; forward < kForwards; ++forward) go_back(forward);
  machine.finish();
  int num_wrong = 0;
  for (int i = 0; i < kForwards * kModules; ++i) {
    num_wrong += found[static_cast<std::size_t>(i)] == static_cast<float>(10 * (i / kModules) + i % kModules) ? 0 : 1;
  }
  return num_wrong;
}

TEST(ActivationStore, what_was_saved_comes_back_if_any_lane_is_late) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    for (const bool in_order : {true, false}) {
      Machine machine({.seed = seed});
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

TEST(ActivationStore, a_room_is_filled_and_never_exceeded) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    std::int64_t num_offloaded = 3 * 2 * kModules;
    for (const int bundles : {2, 3, 5, 8, 12, 16}) {
      Machine machine({.seed = seed, .room = kBytes * bundles});
      EXPECT_EQ(count_wrong(machine, /*in_order=*/true), 0) << bundles << " bundles, seed " << seed;
      EXPECT_EQ(machine.stats().most_there, kBytes * bundles);
      EXPECT_EQ(machine.stats().num_unforeseen, 0);
      EXPECT_LE(machine.stats().num_offloaded, num_offloaded);
      num_offloaded = machine.stats().num_offloaded;
    }
    EXPECT_EQ(num_offloaded, 0);
  }
}

TEST(ActivationStore, who_leaves_is_whose_backward_comes_last) {
  Machine machine({.room = kBytes * (kModules + 2)});
  std::vector<SavedId> first, second;
  for (std::vector<SavedId>* saved : {&first, &second}) {
    machine.begin_forward();
    for (int module = 0; module < kModules; ++module) saved->push_back(machine.forward(module, 1.0F));
  }
  EXPECT_GE(machine.stats().num_offloaded, kModules - 2);
  std::vector<float> found(kModules, 0);
  for (int module = kModules - 1; module >= 0; --module) {
    const auto at = static_cast<std::size_t>(module);
    machine.backward(module, first[at], &found[at]);
  }
  EXPECT_LE(machine.stats().num_reloaded, 2);  // of the second, ahead of its backward; all of the first has stayed
  machine.finish();
  EXPECT_EQ(found, std::vector<float>(kModules, 1));
}

/// A forward or backward of some modules, with what they save of a micro-batch.
struct Turn {
  Phase phase;
  int first_module, micro_batch;
};

/// One rank's of an interleaved 1F1B of two ranks with two stages each: its stages' modules are halves of all.
std::vector<Turn> interleaved(int rank, int num_micro_batches) {
  constexpr int kRanks = 2, kStages = 2, kHalf = kModules / kStages;
  const auto turn = [&](Phase phase, int nth) {
    const int round = nth / (kRanks * kStages), within = nth % (kRanks * kStages), stage = within / kRanks;
    const int of_backward = phase == Phase::forward ? stage : kStages - 1 - stage;
    return Turn{phase, of_backward * kHalf, round * kRanks + within % kRanks};
  };
  const int num_turns = num_micro_batches * kStages;
  const int ahead = std::min((kStages - 1) * kRanks + (kRanks - 1 - rank) * 2, num_turns);
  std::vector<Turn> turns;
  for (int nth = 0; nth < num_turns + ahead; ++nth) {
    if (nth < num_turns) turns.push_back(turn(Phase::forward, nth));
    if (nth >= ahead) turns.push_back(turn(Phase::backward, nth - ahead));
  }
  return turns;
}

/// How many leave at least, where so many stay after each forward.
int count_leaving(const std::vector<Turn>& turns, int num_staying) {
  using Saved = std::pair<int, int>;  // module, micro-batch
  const auto next_use = [&](std::size_t now, const Saved& saved) {
    int when = 0;
    for (std::size_t i = now; i < turns.size(); ++i) {
      for (int module = turns[i].first_module + kModules / 2 - 1; module >= turns[i].first_module; --module, ++when) {
        if (turns[i].phase == Phase::backward && saved == Saved{module, turns[i].micro_batch}) return when;
      }
    }
    return when;
  };
  std::set<Saved> there;
  int num_leaving = 0;
  for (std::size_t i = 0; i < turns.size(); ++i) {
    for (int module = turns[i].first_module; module < turns[i].first_module + kModules / 2; ++module) {
      if (turns[i].phase == Phase::backward) {
        there.erase({module, turns[i].micro_batch});
        continue;
      }
      there.insert({module, turns[i].micro_batch});
      if (static_cast<int>(there.size()) <= num_staying) continue;
      there.erase(std::max_element(there.begin(), there.end(),
                                   [&](auto a, auto b) { return next_use(i + 1, a) < next_use(i + 1, b); }));
      ++num_leaving;
    }
  }
  return num_leaving;
}

TEST(ActivationStore, stages_that_take_turns_on_a_rank_are_known_from_the_second_step) {
  for (const int rank : {0, 1}) {
    for (const int num_staying : {8, 12, 16}) {
      const std::vector<Turn> turns = interleaved(rank, 4);
      Machine machine({.room = kBytes * (num_staying + 2)});
      for (int step = 0; step < 3; ++step) {
        const std::int64_t before = machine.stats().num_offloaded;
        std::map<std::pair<int, int>, SavedId> saved;
        std::map<std::pair<int, int>, float> found;
        for (const auto& [phase, first, micro_batch] : turns) {
          if (phase == Phase::forward) machine.begin_forward();
          for (int i = 0; i < kModules / 2; ++i) {
            const int module = phase == Phase::forward ? first + i : first + kModules / 2 - 1 - i;
            const std::pair at{module, micro_batch};
            if (phase == Phase::backward) machine.backward(module, saved.at(at), &found[at]);
            else saved[at] = machine.forward(module, static_cast<float>(10 * micro_batch + module));
          }
        }
        machine.finish();
        for (const auto& [at, value] : found) EXPECT_EQ(value, static_cast<float>(10 * at.second + at.first));
        EXPECT_EQ(found.size(), 4 * kModules);
        const std::int64_t left = machine.stats().num_offloaded - before;
        const int least = count_leaving(turns, num_staying);
        EXPECT_GE(left, least);
        if (step > 0) {
          EXPECT_LE(left, least + 2) << rank << ' ' << num_staying;  // two bundles come ahead
        }
      }
    }
  }
}

TEST(ActivationStore, a_wrong_guess_costs_no_bit) {
  for (const int bundles : {2, 5}) {
    Machine machine({.seed = 1, .room = kBytes * bundles});
    for (const bool in_order : {false, true, false}) {
      const std::int64_t before = machine.stats().num_unforeseen;
      EXPECT_EQ(count_wrong(machine, in_order), 0);
      EXPECT_EQ(machine.stats().num_unforeseen > before, !in_order);
    }
  }
}

// As a graph does that is dropped after some of its backward, while the tensors of its next blocks are on their way.
TEST(ActivationStore, what_is_no_longer_asked_for_does_not_come_back_over_the_next_owner_of_its_memory) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "memory that is free too early races, which is what this looks for";
#endif
  for (const std::vector<int>& peers : {std::vector<int>{}, {100}}) {
    Machine machine({.hold_reloads_us = 20'000, .room = kBytes * 4, .peers = peers});
    for (int round = 0; round < 3; ++round) {
      std::vector<SavedId> saved, next;
      std::vector<float> found(kModules, -2);
      machine.begin_forward();
      for (int module = 0; module < kModules; ++module) saved.push_back(machine.forward(module, 1));
      const std::int64_t before = machine.stats().num_reloaded;
      int used = kModules;
      while (machine.stats().num_reloaded == before) {
        --used;
        machine.backward(used, saved[static_cast<std::size_t>(used)], &found[static_cast<std::size_t>(used)]);
      }
      for (int module = used - 1; module >= 0; --module) machine.forget(saved[static_cast<std::size_t>(module)]);
      machine.begin_forward();
      for (int module = 0; module < kModules; ++module) next.push_back(machine.forward(module, 2));
      for (int module = kModules - 1; module >= 0; --module) {
        const auto at = static_cast<std::size_t>(module);
        machine.backward(module, next[at], &found[at]);
      }
      machine.finish();
      EXPECT_EQ(found, std::vector<float>(kModules, 2));
    }
    machine.let_go();
    EXPECT_EQ(machine.held(), Bytes{0});
    EXPECT_EQ(machine.stats().at_peers, Bytes{0});
  }
}

TEST(ActivationStore, what_is_forgotten_while_it_leaves_gives_its_room_to_the_next_forward) {
  for (const std::vector<int>& peers : {std::vector<int>{}, {100}}) {
    Machine machine({.hold_offloads_us = 10'000, .room = kBytes * 4, .peers = peers});
    for (int round = 0; round < 3; ++round) {
      std::vector<SavedId> saved;
      machine.begin_forward();
      for (int module = 0; module < kModules; ++module) saved.push_back(machine.forward(module, 1));
      for (SavedId each : saved) machine.forget(each);
    }
    EXPECT_GT(machine.stats().num_offloaded, kModules);
    EXPECT_EQ(machine.stats().most_there, kBytes * 4);
  }
}

TEST(ActivationStore, a_room_for_less_than_two_bundles_is_refused) {
  Machine machine({.room = kBytes + kBytes - Bytes{1}});
  machine.begin_forward();
  (void)machine.forward(0, 1.0F);
  EXPECT_THROW((void)machine.forward(1, 1.0F), UsageError);
}

TEST(ActivationStore, peers_are_used_first_and_the_home_for_what_they_have_no_room_for) {
  // 0: nothing, 1: something, 2: all.
  const std::vector<std::pair<std::vector<int>, int>> cases{{{100}, 0}, {{30, 30, 30}, 0}, {{2, 1}, 1}, {{}, 2}};
  for (const auto& [peers, at_home] : cases) {
    for (const bool in_order : {true, false}) {
      // Large enough to be cut into an extent for each link.
      Machine machine({.seed = 1, .peers = peers, .block = Bytes{768 << 10}});
      EXPECT_EQ(count_wrong(machine, in_order), 0);
      const SavedStats& stats = machine.stats();
      EXPECT_GT(stats.num_offloaded, 30);
      EXPECT_EQ(stats.offloaded == stats.offloaded_to_peers, at_home == 0);
      EXPECT_EQ(stats.offloaded_to_peers > Bytes{0}, at_home < 2);
      EXPECT_EQ(stats.reloaded_from_peers > Bytes{0}, at_home < 2);
      EXPECT_EQ(stats.num_unforeseen > 0, !in_order);
      machine.let_go();
      EXPECT_EQ(machine.stats().at_peers, Bytes{0});
      EXPECT_EQ(machine.held(), Bytes{0});
    }
  }
}

TEST(ActivationStore, what_is_cut_over_links_comes_back_whole_with_any_size) {
  for (const std::int64_t bytes : {4096, 262'144, 262'148, 524'300, 1'000'004, 3'000'000}) {
    Machine machine({.seed = 1, .peers = {40, 40, 40}, .block = Bytes{bytes}});
    EXPECT_EQ(count_wrong(machine, /*in_order=*/true), 0) << bytes;
    EXPECT_EQ(machine.stats().offloaded, machine.stats().offloaded_to_peers);
  }
}

TEST(ActivationStore, what_is_cut_goes_over_each_link_in_proportion_to_what_it_carries) {
  constexpr Bytes kBlock{6 * (256 << 10)};
  Machine machine({.peers = {40, 40, 40}, .block = kBlock});
  machine.begin_forward();
  const std::int32_t no_zero_byte = 0x3f3f3f3f;
  float value = 0;
  std::memcpy(&value, &no_zero_byte, sizeof value);
  std::vector<SavedId> saved;
  for (int module = 0; module < kModules; ++module) saved.push_back(machine.forward(module, value));
  machine.idle();
  const std::int64_t share = machine.stats().offloaded_to_peers.count / 6;
  EXPECT_GT(share, 0);
  for (const int peer : {0, 1, 2}) EXPECT_EQ(machine.count_written(peer), share * (1 + peer)) << peer;
}

TEST(ActivationStore, a_rank_lends_once) {
  Machine machine({.peers = {1}});
  EXPECT_THROW(machine.add_peer(0), InvariantError);
}

TEST(ActivationStore, a_stage_of_a_pipeline_takes_no_more_elsewhere_than_it_lacks) {
  // Three forwards are in flight at most; what comes back has given its place away.
  for (const std::uint64_t seed : {1, 2, 3}) {
    for (const int bundles : {4, 8, 16}) {
      const int lacking = 3 * kModules - (bundles - 2);
      Machine machine({.seed = seed, .room = kBytes * bundles, .peers = {lacking}});
      EXPECT_EQ(count_wrong_in_turn(machine), 0);
      EXPECT_EQ(machine.stats().most_there, kBytes * bundles);
      EXPECT_EQ(machine.stats().offloaded, machine.stats().offloaded_to_peers) << bundles;
      EXPECT_EQ(machine.stats().num_unforeseen, 0);
    }
  }
}

TEST(ActivationStore, no_way_is_made_for_modules_that_save_nothing) {
  for (int round = 0; round < 2; ++round) {
    Machine machine({.room = kBytes * kModules});
    for (int step = 0; step < 3; ++step) {
      std::vector<SavedId> saved;
      machine.begin_forward();
      for (int module = 0; module < kModules; ++module) saved.push_back(machine.forward(module, 1.0F));
      machine.visit_head();
      for (int module = kModules - 1; module >= 0; --module) {
        float found = 0;
        machine.backward(module, saved[static_cast<std::size_t>(module)], &found);
        machine.finish();
        EXPECT_EQ(found, 1.0F);
      }
    }
    // The first time it is not known.
    EXPECT_LE(machine.stats().num_offloaded, 1);
  }
}

TEST(ActivationStore, where_some_of_the_room_is_lent_two_bundles_have_theirs_still) {
  Machine machine({.seed = 1, .room = kBytes * 8});
  machine.set_room(kBytes + kBytes - Bytes{1});
  EXPECT_EQ(count_wrong(machine, /*in_order=*/true), 0);
  EXPECT_LE(machine.stats().most_there, kBytes * 2);
}

TEST(ActivationStore, the_room_may_get_another_size_between_steps) {
  const Bytes plenty = kBytes * 8 * kModules;
  Machine machine({.seed = 1, .room = plenty});
  EXPECT_EQ(count_wrong(machine, /*in_order=*/true), 0);
  EXPECT_EQ(machine.stats().num_offloaded, 0);
  machine.resize_room(kBytes * 2 -
                      Bytes{1});  // less than two bundles: that is refused only if it was so from the start
  EXPECT_EQ(count_wrong(machine, /*in_order=*/true), 0);
  const std::int64_t small = machine.stats().num_offloaded;
  EXPECT_GT(small, 0);
  machine.resize_room(plenty);
  EXPECT_EQ(count_wrong(machine, /*in_order=*/true), 0);
  EXPECT_EQ(machine.stats().num_offloaded, small);
}

TEST(ActivationStore, a_peer_that_wants_memory_back_has_it_when_nothing_lies_there_and_it_is_not_used_again) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    Machine machine({.seed = seed, .hold_reloads_us = 5'000});
    const std::byte* const lent = machine.borrow(kBytes * 4);
    EXPECT_EQ(count_wrong(machine, /*in_order=*/true), 0);
    EXPECT_EQ(machine.stats().most_at_peers, kBytes * 4);
    std::vector<SavedId> saved;
    std::vector<float> found(kModules, -2);
    machine.begin_forward();
    for (int module = 0; module < kModules; ++module) saved.push_back(machine.forward(module, 7));
    EXPECT_FALSE(machine.shrink_peer(kBytes));
    for (int module = kModules - 1; module >= 0; --module) {
      machine.backward(module, saved[static_cast<std::size_t>(module)], &found[static_cast<std::size_t>(module)]);
    }
    EXPECT_TRUE(machine.shrink_peer(kBytes));
    EXPECT_EQ(machine.copied(), machine.stats().offloaded_to_peers + machine.stats().reloaded_from_peers);
    std::vector<std::byte> before(lent + kBytes.count, lent + 4 * kBytes.count);
    const Bytes there = machine.stats().offloaded_to_peers;
    EXPECT_EQ(count_wrong(machine, /*in_order=*/true), 0);
    EXPECT_GT(machine.stats().offloaded_to_peers, there);
    EXPECT_EQ(std::memcmp(before.data(), lent + kBytes.count, before.size()), 0);
    machine.finish();
    EXPECT_EQ(found, std::vector<float>(kModules, 7));
    EXPECT_TRUE(machine.shrink_peer(Bytes{0}));
    EXPECT_EQ(count_wrong(machine, /*in_order=*/true), 0);
  }
}

TEST(ActivationStore, a_peer_has_its_memory_back_although_what_was_forgotten_is_still_on_its_way_there) {
  Machine machine({.hold_offloads_us = 20'000});
  machine.borrow(kBytes * kModules);
  std::vector<SavedId> saved;
  std::vector<float> found(kModules, -2);
  machine.begin_forward();
  for (int module = 0; module < kModules; ++module) saved.push_back(machine.forward(module, 7));
  for (int module = kModules - 1; module >= 0; --module) {
    machine.backward(module, saved[static_cast<std::size_t>(module)], &found[static_cast<std::size_t>(module)]);
  }
  EXPECT_LT(machine.stats().num_reloaded, machine.stats().num_offloaded);  // some were needed before they had left
  EXPECT_TRUE(machine.shrink_peer(Bytes{0}));
  machine.finish();
  EXPECT_EQ(found, std::vector<float>(kModules, 7));
}

TEST(ActivationStore, what_a_visit_that_fails_was_waiting_for_stays_until_its_copy_is_over) {
  Machine machine({});
  std::vector<SavedId> saved;
  machine.begin_forward();
  for (int module = 0; module < kModules; ++module) saved.push_back(machine.forward(module, 1.0F));
  machine.finish();
  const Ticket held = machine.hold_fetches();
  machine.reset();  // sees what has left
  ASSERT_FALSE(machine.is_on_device(saved[0]));
  machine.enter_backward(0);
  machine.forget(saved[0]);
  machine.reset();
  EXPECT_TRUE(machine.is_on_device(saved[0]));  // a copy writes there
  machine.let_fetches_go(held);
  machine.reset();
  EXPECT_FALSE(machine.is_on_device(saved[0]));
}

TEST(ActivationStore, an_unforeseen_tensor_says_nothing_of_the_end_of_the_visit_that_asks) {
  Machine machine({.peers = {100}});
  std::vector<SavedId> first, second;
  for (std::vector<SavedId>* saved : {&first, &second}) {
    machine.begin_forward();
    for (int module = 0; module < kModules; ++module) saved->push_back(machine.forward(module, 1.0F));
  }
  std::vector<float> found(kModules, 0);
  for (int module = kModules - 1; module >= 0; --module) {  // of the wrong forward
    const auto at = static_cast<std::size_t>(module);
    machine.backward(module, second[at], &found[at]);
    EXPECT_TRUE(machine.is_last_visit_waited_for()) << module;
  }
  EXPECT_GT(machine.stats().num_unforeseen, 0);
  EXPECT_EQ(machine.stats().offloaded, machine.stats().offloaded_to_peers);
  machine.finish();
  EXPECT_EQ(found, std::vector<float>(kModules, 1));
}

TEST(ActivationStore, only_as_many_storages_leave_as_are_in_the_way) {
  // Two bundles of four have their place in the room; what else it has is filled to the last storage.
  constexpr int kStorages = 4;
  for (const int more : {0, 1, 2, 3, 4, 5}) {
    Machine machine({.room = kBytes * (2 * kStorages + more), .home_blocks = kModules * kStorages});
    const std::vector<Bytes> sizes(kStorages, kBytes);
    std::vector<std::vector<SavedId>> saved;
    machine.begin_forward();
    for (int module = 0; module < kModules; ++module) {
      saved.push_back(machine.forward_many(module, sizes, static_cast<float>(module)));
    }
    const int num_there = std::max(more, kStorages);  // one bundle stays in any case
    EXPECT_EQ(machine.stats().num_offloaded, kModules * kStorages - num_there) << more;
    for (int module = kModules - 1; module >= 0; --module) {
      const auto& its = saved[static_cast<std::size_t>(module)];
      EXPECT_EQ(machine.count_wrong_of(module, its, sizes, static_cast<float>(module)), 0);
    }
    EXPECT_EQ(machine.stats().num_unforeseen, 0);
    EXPECT_LE(machine.stats().most_there, kBytes * (2 * kStorages + more));
  }
}

TEST(ActivationStore, storages_of_any_size_leave_in_part_and_come_back_whole) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const std::vector<Bytes> sizes{Bytes{4096}, Bytes{512}, Bytes{1024}, Bytes{2048}};
    for (int round = 0; round < 4; ++round) {
      const Bytes room{2 * 7680 + static_cast<std::int64_t>(random() % 16'000)};
      Machine machine({.seed = seed, .room = room, .peers = {static_cast<int>(random() % 6) + 1}, .home_blocks = 200});
      std::vector<std::vector<SavedId>> saved;
      for (int forward = 0; forward < 2; ++forward) {
        machine.begin_forward();
        for (int module = 0; module < kModules; ++module) {
          saved.push_back(machine.forward_many(module, sizes, static_cast<float>(saved.size())));
        }
      }
      for (const int first : {0, kModules}) {
        for (int module = kModules - 1; module >= 0; --module) {
          const auto at = static_cast<std::size_t>(first + module);
          EXPECT_EQ(machine.count_wrong_of(module, saved[at], sizes, static_cast<float>(at)), 0);
        }
      }
      EXPECT_EQ(machine.stats().num_unforeseen, 0);
      EXPECT_LE(machine.stats().most_there, room);
    }
  }
}

TEST(ActivationStore, what_is_sent_home_takes_no_room_of_peers) {
  Machine machine({.seed = 1, .peers = {100}});
  std::set<HookId> most;
  for (int module = 1; module < kModules; ++module) most.insert(HookId(module));
  machine.send_home(most);
  EXPECT_EQ(count_wrong(machine, /*in_order=*/true), 0);
  const SavedStats& stats = machine.stats();
  EXPECT_EQ(stats.offloaded_to_peers, kBytes * 6);  // of the first module
  EXPECT_GT(stats.offloaded, stats.offloaded_to_peers);
}

TEST(ActivationStore, what_the_caller_waits_for_what_leaves_is_told_once) {
  Machine machine({.hold_offloads_us = 2'000, .room = kBytes * 2});
  EXPECT_EQ(machine.take_waited_us(), 0);
  machine.begin_forward();
  for (int module = 0; module < kModules; ++module) (void)machine.forward(module, 1.0F);
  EXPECT_GT(machine.take_waited_us(), 0);
  EXPECT_EQ(machine.take_waited_us(), 0);
}

const std::set<std::string> kMatter{"save -> offload on saved_tensor (RAW)", "save -> reload on saved_tensor (WAW)",
                                    "reload -> backward on saved_tensor (RAW)"};

void expect_waits_to_matter(const Setting& plain) {
  for (const std::string& kind : kMatter) {
    Setting setting = plain;
    setting.seed = 1;
    setting.hold_reloads_us = kind.starts_with("reload") ? 20'000 : 0;
    Machine machine(setting);
    machine.omit(kind);
    EXPECT_GT(count_wrong(machine, /*in_order=*/true), 0) << kind;
  }
}

// Nothing is reloaded, and no token is handed on, before its copies are over: so what waits for those is never held up.
TEST(ActivationStore, all_other_kinds_of_wait_are_for_what_is_over_already) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "without its waits it races, on purpose";
#endif
  const std::vector<Setting> settings{{},
                                      {.room = kBytes * 2, .peers = {100}},
                                      {.room = kBytes * 5, .peers = {3}},
                                      {.peers = {2, 1}},
                                      {.room = kLarge * 5, .peers = {40, 40, 40}, .block = kLarge}};
  const auto count_all = [](Machine& machine) {
    return count_wrong(machine, true) + count_wrong(machine, false) + count_wrong_in_turn(machine);
  };
  std::set<std::string> never_late;
  for (const Setting& setting : settings) {
    Machine machine(setting);
    EXPECT_EQ(count_all(machine), 0);
    for (const std::string& kind : machine.kinds()) {
      if (kMatter.contains(kind)) continue;
      never_late.insert(kind);
      const bool is_reload = kind.starts_with("reload");
      Setting held = setting;
      held.hold_reloads_us = is_reload ? 2'000 : 0;
      held.hold_offloads_us = is_reload ? 0 : 2'000;
      Machine without(held);
      without.omit(kind);
      EXPECT_EQ(count_all(without), 0) << kind;
    }
  }
  EXPECT_EQ(never_late,
            (std::set<std::string>{"offload -> save on saved_tensor (WAR)", "reload -> save on saved_tensor (WAW)"}));
}

TEST(ActivationStore, each_kind_of_wait_matters) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "without its waits it races, on purpose";
#endif
  expect_waits_to_matter({});
}

TEST(ActivationStore, each_kind_of_wait_of_the_peer_lane_matters) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "without its waits it races, on purpose";
#endif
  expect_waits_to_matter({.peers = {100}});
}

}  // namespace
}  // namespace noria
