// The host pool: what it promises about order, failure and letting go. The arithmetic is tested from Python.
#include "optim/host_optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "base/errors.h"
#include "device/host_ticket.h"
#include "testing/slow_pace.h"

namespace noria {
namespace {

OpLabel label(std::int64_t op) { return {OpId(op), Lane::update, Verb::update, UnitId(0)}; }

std::shared_ptr<HostTicket> open_ticket(std::int64_t op = 1000) {
  return std::make_shared<HostTicket>(OpLabel{OpId(op), Lane::drain, Verb::drain, UnitId(0)});
}

// Arrays of one unit, and a job over them.
struct Unit {
  explicit Unit(std::size_t count) : p(count, 1.0f), m(count), v(count), g(count, 0.5f) {}

  UnitArrays arrays() { return {p.data(), nullptr, nullptr, {.fp32 = m.data()}, {.fp32 = v.data()}}; }
  UpdateJob job(std::int64_t step = 1) {
    UpdateJob result;
    result.arrays = arrays();
    result.gradient = g.data();
    UpdatePiece& piece = result.pieces.emplace_back();
    piece.count = static_cast<std::int64_t>(p.size());
    piece.scalars = update_scalars(UpdateRule::adamw, {}, step);
    return result;
  }
  void update_by_hand(std::int64_t step = 1) {
    const UpdateJob by_hand = job(step);
    update_elements(by_hand, by_hand.pieces.front(), 0, static_cast<std::int64_t>(p.size()));
  }
  bool updated() const { return p.front() != 1.0f && p.back() != 1.0f; }

  std::vector<float> p, m, v, g;
};

HostOptimizerOptions threads(int count) {
  HostOptimizerOptions options;
  options.num_threads = count;
  return options;
}

// A ticket of a device: it can be issued long before it is passed.
class DeviceTicket final : public TicketState {
 public:
  using TicketState::TicketState;

  bool passed() const override { return passed_; }
  void wait_passed() override {
    waited_for.set_value();
    pass_now.get_future().wait();
    passed_ = true;
  }
  void wait_issued() override {}
  void when_issued(std::function<void()> callback) override {
    if (issued_) callback();
    else callback_ = std::move(callback);
  }
  void issue() {
    issued_ = true;
    if (callback_) std::exchange(callback_, nullptr)();
  }

  std::promise<void> waited_for, pass_now;

 private:
  std::atomic<bool> passed_ = false;
  bool issued_ = false;
  std::function<void()> callback_;
};

TEST(HostOptimizer, JobWaitsForAllItsTickets) {
  HostOptimizer optimizer(threads(1));
  Unit unit(10), other(10);
  const auto first = open_ticket(), second = open_ticket();
  const Ticket sealed = optimizer.submit(label(1), unit.job(), {first, second});
  first->pass();
  // Another job goes through the whole pool meanwhile: the waiting one had every chance to run.
  optimizer.submit(label(2), other.job(), {})->wait_passed();
  EXPECT_TRUE(other.updated());
  EXPECT_FALSE(sealed->passed());
  EXPECT_FALSE(unit.updated());
  second->pass();
  sealed->wait_passed();
  EXPECT_TRUE(unit.updated());
}

TEST(HostOptimizer, FirstReadyInOrderOfSubmissionRunsFirst) {
  HostOptimizer optimizer(threads(1));
  Unit blocking(10);
  const auto device = std::make_shared<DeviceTicket>(label(1000));
  device->issue();
  optimizer.submit(label(100), blocking.job(), {device});
  device->waited_for.get_future().wait();  // the pool is busy: what follows is ready before it looks again
  const auto gate = open_ticket();
  std::vector<std::unique_ptr<Unit>> units;
  std::vector<std::int64_t> order;
  for (std::int64_t op = 0; op < 8; ++op) {
    units.push_back(std::make_unique<Unit>(100));
    const auto ticket = std::dynamic_pointer_cast<HostTicket>(optimizer.submit(label(op), units.back()->job(), {gate}));
    ASSERT_NE(ticket, nullptr);
    ticket->when_done([&order, op] { order.push_back(op); });  // on the pool's one thread
  }
  gate->pass();
  device->pass_now.set_value();
  optimizer.idle();
  EXPECT_EQ(order, (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(HostOptimizer, MostUrgentReadyJobRunsFirst) {
  HostOptimizer optimizer(threads(1));
  Unit blocking(10);
  const auto device = std::make_shared<DeviceTicket>(label(1000));
  device->issue();
  optimizer.submit(label(100), blocking.job(), {device});
  device->waited_for.get_future().wait();  // the pool is busy: what follows is ready before it looks again
  std::vector<std::unique_ptr<Unit>> units;
  std::vector<std::int64_t> order;
  const std::vector<int> priorities{4, 2, 9, 2, 4};
  for (std::size_t op = 0; op < priorities.size(); ++op) {
    units.push_back(std::make_unique<Unit>(100));
    const auto id = static_cast<std::int64_t>(op);
    const auto ticket =
        std::dynamic_pointer_cast<HostTicket>(optimizer.submit(label(id), units.back()->job(), {}, priorities[op]));
    ASSERT_NE(ticket, nullptr);
    ticket->when_done([&order, id] { order.push_back(id); });  // on the pool's one thread
  }
  device->pass_now.set_value();
  optimizer.idle();
  EXPECT_EQ(order, (std::vector<std::int64_t>{1, 3, 0, 4, 2}));
}

TEST(HostOptimizer, RecalledJobNeverRunsAndLetsGoOfItsTickets) {
  HostOptimizer optimizer(threads(1));
  Unit unit(10), after(10);
  const auto gate = open_ticket();
  const Ticket recalled = optimizer.submit(label(1), unit.job(), {gate});
  const Ticket behind = optimizer.submit(label(2), after.job(), {recalled});
  EXPECT_TRUE(optimizer.recall(recalled));
  EXPECT_FALSE(optimizer.recall(recalled));
  EXPECT_FALSE(optimizer.recall(gate));
  EXPECT_FALSE(recalled->passed());  // ops that wait for it count on the gate
  gate->pass();
  behind->wait_passed();
  EXPECT_TRUE(recalled->passed());
  EXPECT_TRUE(after.updated());
  EXPECT_FALSE(optimizer.recall(behind));
  optimizer.idle();
  EXPECT_FALSE(unit.updated());
  EXPECT_EQ(gate.use_count(), 1);
  EXPECT_EQ(optimizer.stats().num_ops, 1);
}

TEST(HostOptimizer, RecallsAndUpdatesOnManyThreadsLeaveEachJobDoneOrUndone) {
  HostOptimizer optimizer(threads(2));
  for (int round = 0; round < 50; ++round) {
    std::vector<std::unique_ptr<Unit>> units;
    std::vector<Ticket> tickets;
    for (int i = 0; i < 8; ++i) units.push_back(std::make_unique<Unit>(100));
    for (int i = 0; i < 8; ++i) tickets.push_back(optimizer.submit(label(i), units[i]->job(), {}, i % 3));
    std::vector<char> recalled(8);
    std::thread recaller([&] {
      for (std::size_t i = 0; i < 8; ++i) recalled[i] = optimizer.recall(tickets[7 - i]);
    });
    recaller.join();
    optimizer.idle();
    for (std::size_t i = 0; i < 8; ++i) {
      EXPECT_TRUE(tickets[7 - i]->passed());
      EXPECT_EQ(units[7 - i]->updated(), recalled[i] == 0);
    }
  }
}

HostOptimizerOptions paced(std::shared_ptr<Pace> pace) {
  HostOptimizerOptions options = threads(1);
  options.pace = std::move(pace);
  return options;
}

// A unit after five steps, and a log for drafts of the sixth.
struct Drafted : Unit {
  explicit Drafted(std::size_t count) : Unit(count), memory(log_size(count) + 64) {
    for (std::size_t i = 0; i < count; ++i) g[i] = 1e-3f * static_cast<float>(i % 97) - 0.04f;
    for (const std::int64_t step : {1, 2, 3, 4, 5}) update_by_hand(step);
  }
  static UndoLogSize size_of(std::int64_t elements) { return {elements, num_undo_blocks(elements), elements / 32}; }
  static std::size_t log_size(std::size_t count) {
    const auto elements = static_cast<std::int64_t>(count);
    return static_cast<std::size_t>(undo_log_bytes(size_of(elements)).count);
  }
  UpdateJob draft() {
    auto elements = static_cast<std::int64_t>(p.size());
    void* start = memory.data();
    std::size_t room = memory.size();
    std::align(64, memory.size() - 64, start, room);
    UpdateJob made = job(6);
    make_draft(made, undo_log_at(static_cast<std::byte*>(start), size_of(elements)));
    return made;
  }
  bool operator==(const Drafted& other) const { return p == other.p && m == other.m && v == other.v; }

  std::vector<std::byte> memory;
};

OpLabel label_of(Verb verb, std::int64_t op) { return {OpId(op), Lane::update, verb, UnitId(0)}; }

TEST(HostOptimizer, DraftIsTheUpdateAndItsUndoRestoresEveryBit) {
  HostOptimizer optimizer(threads(2));
  Drafted unit(100'003), twin(100'003), before(100'003);
  const UpdateJob draft = unit.draft();
  optimizer.submit(label_of(Verb::draft, 1), draft, {})->wait_passed();
  twin.update_by_hand(6);
  UpdateJob finish = unit.job(6);
  make_redo(finish, draft);
  optimizer.submit(label_of(Verb::update, 2), finish, {})->wait_passed();
  EXPECT_EQ(unit, twin);
  optimizer.submit(label_of(Verb::undo, 3), undo_of(draft), {})->wait_passed();
  if (draft.progress->num_left_out == 0) {
    EXPECT_EQ(unit, before);
  }
}

TEST(HostOptimizer, SettledDraftIsTheUpdateThatWasAskedFor) {
  HostOptimizer optimizer(threads(3));
  Drafted unit(100'003), twin(100'003);
  const UpdateJob draft = unit.draft();
  optimizer.submit(label_of(Verb::draft, 1), draft, {})->wait_passed();
  UpdateJob other = unit.job(6);
  float scale = 0.5f;
  other.pieces.front().late_scales = &scale;
  other.pieces.front().num_late_scales = 1;
  make_redo(other, draft);
  other.looks = std::make_shared<LookCounts>();
  optimizer.submit(label_of(Verb::update, 2), other, {})->wait_passed();
  EXPECT_EQ(other.looks->changed, 1);
  for (float& g : twin.g) g *= scale;
  twin.update_by_hand(6);
  EXPECT_EQ(unit, twin);
}

// The lists of 900 blocks do not fit: every moment is new.
TEST(HostOptimizer, BlocksWithoutRoomInTheLogAreLeftForStep) {
  HostOptimizer optimizer(threads(2));
  Drafted unit(100'000), twin(100'000), before(100'000);
  for (Drafted* each : {&unit, &twin, &before}) {
    for (std::size_t i = 0; i < each->v.size(); ++i) each->v[i] = 1e-12f * static_cast<float>(i % 1000 + 1);
  }
  const UpdateJob draft = unit.draft();
  optimizer.submit(label_of(Verb::draft, 1), draft, {})->wait_passed();
  EXPECT_GT(draft.progress->num_left_out, 0u);
  optimizer.submit(label_of(Verb::undo, 2), undo_of(draft), {})->wait_passed();
  EXPECT_EQ(unit, before);
  const UpdateJob again = unit.draft();
  optimizer.submit(label_of(Verb::draft, 3), again, {})->wait_passed();
  UpdateJob finish = unit.job(6);
  make_redo(finish, again);
  optimizer.submit(label_of(Verb::update, 4), finish, {})->wait_passed();
  twin.update_by_hand(6);
  EXPECT_EQ(unit, twin);
}

// A job of muon over one matrix, whose products only negate it.
UpdateJob muon_job(Unit& unit, std::int64_t num_rows) {
  UpdateJob job = unit.job();
  job.rule = UpdateRule::muon;
  job.arrays.v = {};
  UpdateHyper hyper;
  hyper.momentum = 0.5;
  UpdatePiece& piece = job.pieces.front();
  piece.scalars = update_scalars(UpdateRule::muon, hyper, 1);
  piece.factored.num_rows = num_rows;
  piece.factored.num_columns = piece.count / num_rows;
  job.orthogonalize = [](const MatrixToOrthogonalize& matrix) {
    auto* values = static_cast<float*>(matrix.values);
    for (std::int64_t i = 0; i < matrix.num_rows * matrix.num_columns; ++i) values[i] = -values[i];
  };
  return job;
}

TEST(HostOptimizer, MuonUpdatesBothEndsOnAllThreads) {
  HostOptimizer optimizer(threads(3));
  Unit unit(400'000), twin(400'000);
  for (Unit* each : {&unit, &twin}) {
    for (std::size_t i = 0; i < each->g.size(); ++i) each->g[i] = static_cast<float>(i % 977) * 1e-3f;
  }
  optimizer.submit(label(1), muon_job(unit, 400), {})->wait_passed();
  for (std::size_t i = 0; i < twin.p.size(); ++i) {
    twin.m[i] = 0.5f * twin.g[i];
    const float step = 1e-3f * twin.m[i];
    twin.p[i] += step;
  }
  EXPECT_EQ(unit.m, twin.m);
  EXPECT_EQ(unit.p, twin.p);
}

TEST(HostOptimizer, ProductsThatFailTearTheirUnit) {
  HostOptimizer optimizer(threads(1));
  Unit unit(1'000);
  UpdateJob job = muon_job(unit, 10);
  job.orthogonalize = [](const MatrixToOrthogonalize&) { throw std::runtime_error("no memory for products"); };
  const Ticket ticket = optimizer.submit(label(1), job, {});
  EXPECT_THROW(ticket->wait_passed(), std::runtime_error);
  EXPECT_EQ(optimizer.torn().at(UnitId(0)), "no memory for products");
}

// Threads race for the last slots; the lists of the blocks that have some must not overlap.
TEST(HostOptimizer, BlocksThatRaceForTheLastSlotsShareNone) {
  HostOptimizer optimizer(threads(4));
  Drafted unit(2'000'000), before(2'000'000);
  for (Drafted* each : {&unit, &before}) {
    // Kept as they are, and all different: a slot that two blocks had would show.
    for (std::size_t i = 0; i < each->v.size(); i += 29) each->v[i] = 1e-15f * static_cast<float>(i + 1);
  }
  for (int round = 0; round < 10; ++round) {
    const UpdateJob draft = unit.draft();
    optimizer.submit(label_of(Verb::draft, 1), draft, {})->wait_passed();
    EXPECT_GT(draft.progress->num_left_out, 0u);
    optimizer.submit(label_of(Verb::undo, 2), undo_of(draft), {})->wait_passed();
    ASSERT_EQ(unit, before);
  }
}

// Each of them leaves some chunks as they were and others changed.
TEST(HostOptimizer, DraftThatBreaksOffTearsItsUnitAndSoDoItsUndoAndItsRedo) {
  for (const std::string broken : {"draft", "undo", "redo"}) {
    const auto pace = std::make_shared<SlowPace>(Hostility{});
    HostOptimizer optimizer(paced(pace));
    Drafted unit(200'000);
    const UpdateJob draft = unit.draft();
    UpdateJob redo = unit.job(7);
    make_redo(redo, draft);
    if (broken == "draft") pace->break_next_update();
    const Ticket drafted = optimizer.submit(label_of(Verb::draft, 1), draft, {});
    optimizer.idle();
    if (broken != "draft") {
      EXPECT_TRUE(optimizer.torn().empty());
      pace->break_next_update();
      const bool undoes = broken == "undo";
      optimizer.submit(label_of(undoes ? Verb::undo : Verb::update, 2), undoes ? undo_of(draft) : redo, {drafted});
      optimizer.idle();
    }
    EXPECT_EQ(optimizer.torn().size(), 1u) << broken;
  }
}

// What waits for a draft that broke off does not run: the unit stays torn as it is.
TEST(HostOptimizer, UndoOfADraftThatBrokeOffIsNotMade) {
  const auto pace = std::make_shared<SlowPace>(Hostility{});
  HostOptimizer optimizer(paced(pace));
  Drafted unit(200'000);
  const UpdateJob draft = unit.draft();
  pace->break_next_update();
  const Ticket drafted = optimizer.submit(label_of(Verb::draft, 1), draft, {});
  const Ticket undone = optimizer.submit(label_of(Verb::undo, 2), undo_of(draft), {drafted});
  EXPECT_THROW(undone->wait_passed(), MachineError);
  EXPECT_EQ(optimizer.torn().size(), 1u);
}

TEST(HostOptimizer, UndoOfADraftThatNeverBeganTearsNothing) {
  HostOptimizer optimizer(threads(1));
  Drafted unit(10'000);
  const auto gate = open_ticket();
  const UpdateJob draft = unit.draft();
  const Ticket drafted = optimizer.submit(label_of(Verb::draft, 1), draft, {gate});
  const Ticket undone = optimizer.submit(label_of(Verb::undo, 2), undo_of(draft), {drafted});
  gate->fail(std::make_exception_ptr(MachineError("the drain broke")));
  EXPECT_THROW(undone->wait_passed(), MachineError);
  EXPECT_TRUE(optimizer.torn().empty());
  // Nor does it touch anything if its wait for the draft was given up: the log is of an earlier draft, or of none.
  const Drafted before(10'000);
  optimizer.submit(label_of(Verb::undo, 3), undo_of(draft), {})->wait_passed();
  EXPECT_EQ(unit, before);
  UpdateJob redo = unit.job(6);
  make_redo(redo, draft);
  optimizer.submit(label_of(Verb::update, 4), redo, {})->wait_passed();
  Drafted twin(10'000);
  twin.update_by_hand(6);
  EXPECT_EQ(unit, twin);
}

TEST(HostOptimizer, ChainOfUpdatesOfOneUnitRunsInOrder) {
  // Each job waits for the one before it; a slow twin does the same steps by hand.
  HostOptimizer optimizer(threads(2));
  Unit unit(100'000), twin(100'000);
  Ticket before;
  for (std::int64_t step = 1; step <= 20; ++step) {
    before =
        optimizer.submit(label(step), unit.job(step), before ? std::vector<Ticket>{before} : std::vector<Ticket>{});
    twin.update_by_hand(step);
  }
  before->wait_passed();
  EXPECT_EQ(unit.p, twin.p);
  EXPECT_EQ(unit.m, twin.m);
  EXPECT_EQ(unit.v, twin.v);
}

TEST(HostOptimizer, FailedWaitFailsTheJobWithoutRunningItAndReleasesItsWaiters) {
  HostOptimizer optimizer(threads(1));
  Unit unit(10), after(10), unrelated(10);
  const auto gate = open_ticket();
  const Ticket first = optimizer.submit(label(1), unit.job(), {gate});
  const Ticket second = optimizer.submit(label(2), after.job(), {first});
  gate->fail(std::make_exception_ptr(MachineError("the drain broke")));
  EXPECT_THROW(first->wait_passed(), MachineError);
  EXPECT_THROW(second->wait_passed(), MachineError);
  EXPECT_FALSE(unit.updated());
  EXPECT_FALSE(after.updated());
  optimizer.submit(label(3), unrelated.job(), {})->wait_passed();  // the pool goes on
  EXPECT_EQ(optimizer.stats().num_ops, 1);
}

TEST(HostOptimizer, IssuedTicketOfADeviceIsWaitedForAndReadyJobsGoFirst) {
  HostOptimizer optimizer(threads(1));
  Unit slow(10), ready(10);
  const auto device = std::make_shared<DeviceTicket>(label(1000));
  const auto gate = open_ticket();
  const Ticket waits = optimizer.submit(label(1), slow.job(), {device, gate});
  device->issue();
  optimizer.submit(label(2), ready.job(), {})->wait_passed();  // not held up: the first lacks a ticket
  gate->pass();
  device->waited_for.get_future().wait();
  EXPECT_FALSE(waits->passed());
  EXPECT_FALSE(slow.updated());
  device->pass_now.set_value();
  waits->wait_passed();
  EXPECT_TRUE(slow.updated());
}

// The host runs ahead of a device: drains of all layers are issued long before the first has passed. The next forward
// wants the first layer first, whose gradient comes last.
TEST(HostOptimizer, OfIssuedJobsTheOneThatWasIssuedFirstIsWaitedFor) {
  HostOptimizer optimizer(threads(1));
  Unit blocking(10), early(10), late(10);
  const auto gate = std::make_shared<DeviceTicket>(label(1));
  gate->issue();
  optimizer.submit(label(100), blocking.job(), {gate});
  gate->waited_for.get_future().wait();  // what follows is all there before the pool looks again
  const auto last_layer = std::make_shared<DeviceTicket>(label(10)),
             first_layer = std::make_shared<DeviceTicket>(label(20));
  last_layer->issue();
  first_layer->issue();
  const Ticket urgent = optimizer.submit(label(101), late.job(), {first_layer}, /*priority=*/0);
  const Ticket other = optimizer.submit(label(102), early.job(), {last_layer}, /*priority=*/9);
  gate->pass_now.set_value();
  const auto patience = std::chrono::seconds(10);  // only a failing test takes so long
  EXPECT_EQ(last_layer->waited_for.get_future().wait_for(patience), std::future_status::ready);
  last_layer->pass_now.set_value();
  first_layer->pass_now.set_value();
  other->wait_passed();
  urgent->wait_passed();
  EXPECT_TRUE(early.updated() && late.updated());
}

TEST(HostOptimizer, CloseFailsWhatIsQueuedAndMayBeCalledTwice) {
  HostOptimizer optimizer(threads(1));
  Unit unit(10);
  const auto never = open_ticket();
  const Ticket sealed = optimizer.submit(label(1), unit.job(), {never});
  optimizer.close();
  optimizer.close();
  EXPECT_THROW(sealed->wait_passed(), MachineError);
  EXPECT_FALSE(unit.updated());
  EXPECT_THROW(optimizer.submit(label(2), unit.job(), {}), InvariantError);
  never->pass();  // the late giver finds no waiter, and nothing breaks
}

TEST(HostOptimizer, DestructorReleasesWaitersAndDoesNotWaitForHolds) {
  auto options = threads(1);
  // An hour: only an interrupted hold ends this test.
  options.pace = slow({0, 0, {{Verb::update, 3'600'000'000}}});
  Unit unit(10);
  Ticket sealed;
  {
    HostOptimizer optimizer(options);
    sealed = optimizer.submit(label(1), unit.job(), {});
  }
  EXPECT_THROW(sealed->wait_passed(), MachineError);
}

TEST(HostOptimizer, LetsGoOfTicketsSoThatNothingGrows) {
  const auto gate = open_ticket(), never = open_ticket();
  const auto passed_before = open_ticket();
  passed_before->pass();
  {
    HostOptimizer optimizer(threads(1));
    Unit unit(10);
    Ticket last;
    for (std::int64_t op = 0; op < 200; ++op) {
      last = optimizer.submit(label(op), unit.job(), {gate, passed_before});
    }
    const Ticket abandoned = optimizer.submit(label(200), unit.job(), {never});
    gate->pass();
    last->wait_passed();
    EXPECT_FALSE(abandoned->passed());
    optimizer.close();
    EXPECT_EQ(last.use_count(), 1);
    EXPECT_EQ(abandoned.use_count(), 2);  // the callback in `never` still knows it
  }
  EXPECT_EQ(gate.use_count(), 1);
  EXPECT_EQ(passed_before.use_count(), 1);
  EXPECT_EQ(never.use_count(), 1);
}

TEST(HostOptimizer, SubmitsFromManyThreadsAllRun) {
  auto options = threads(2);
  options.pace = slow({7, 20, {}});
  HostOptimizer optimizer(options);
  constexpr int kThreads = 4, kJobs = 25;
  std::vector<std::unique_ptr<Unit>> units;
  for (int i = 0; i < kThreads * kJobs; ++i) units.push_back(std::make_unique<Unit>(1000));
  std::vector<std::thread> submitters;
  for (int t = 0; t < kThreads; ++t) {
    submitters.emplace_back([&, t] {
      for (int i = t * kJobs; i < (t + 1) * kJobs; ++i) {
        const auto gate = open_ticket();
        optimizer.submit(label(i), units[static_cast<std::size_t>(i)]->job(), {gate});
        gate->pass();
      }
    });
  }
  for (std::thread& submitter : submitters) submitter.join();
  optimizer.idle();
  EXPECT_EQ(optimizer.stats().num_ops, kThreads * kJobs);
  for (const auto& unit : units) EXPECT_TRUE(unit->updated());
}

// A limit promises a time.
TEST(HostOptimizer, LimitIsALowerBoundOfBusyTimeAndBytesAreCounted) {
  auto options = threads(1);
  options.pace = slow({}, {{{Lane::update, {1.0, 50}}}});
  HostOptimizer optimizer(options);
  Unit unit(1 << 18);
  for (std::int64_t op = 0; op < 3; ++op) optimizer.submit(label(op), unit.job(), {});
  optimizer.idle();
  const LaneStats stats = optimizer.stats();
  const double bytes = 3.0 * 28 * (1 << 18);
  EXPECT_EQ(stats.bytes.count, static_cast<std::int64_t>(bytes));
  EXPECT_EQ(stats.num_ops, 3);
  EXPECT_GE(static_cast<double>(stats.busy_us) + 1, bytes / 1073741824.0 * 1e6 + 3 * 50);
}

TEST(HostOptimizer, SpansNameTheOpsThatWereWaitedFor) {
  HostOptimizer optimizer(threads(1));
  const auto trace = std::make_shared<Trace>(100);
  optimizer.set_trace(trace);
  Unit unit(10);
  const auto gate = open_ticket(77);
  const Ticket first = optimizer.submit(label(1), unit.job(), {gate});
  const Ticket second = optimizer.submit(label(2), unit.job(), {first});
  gate->pass();
  second->wait_passed();
  const auto spans = trace->spans();
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0].op, OpId(1));
  EXPECT_EQ(spans[0].waits, std::vector<OpId>{OpId(77)});
  EXPECT_EQ(spans[0].bytes, Bytes{280});
  EXPECT_EQ(spans[1].waits, std::vector<OpId>{OpId(1)});
  EXPECT_EQ(spans[1].verb, Verb::update);
  EXPECT_LE(spans[0].end_us, spans[1].end_us);
}

TEST(HostOptimizer, RefusesJobsThatNoPlanMakes) {
  HostOptimizer optimizer(threads(1));
  Unit unit(10);
  UpdateJob overlapping = unit.job();
  overlapping.pieces.push_back(overlapping.pieces.front());
  overlapping.pieces.back().offset = 9;
  overlapping.pieces.back().count = 1;
  EXPECT_THROW(optimizer.submit(label(1), overlapping, {}), InvariantError);
  UpdateJob lacking = unit.job();
  lacking.arrays.v = {};
  EXPECT_THROW(optimizer.submit(label(1), lacking, {}), InvariantError);
  UpdateJob without_log = unit.job();
  without_log.task = UpdateTask::draft;
  EXPECT_THROW(optimizer.submit(label(1), without_log, {}), InvariantError);
  const OpLabel fetch{OpId(1), Lane::update, Verb::fetch, UnitId(0)};
  EXPECT_THROW(optimizer.submit(fetch, unit.job(), {}), InvariantError);
  EXPECT_THROW(HostOptimizer(threads(-1)), UsageError);
}

TEST(HostOptimizer, FlushingOfDenormalsDoesNotLeakOut) {
  HostOptimizer optimizer(threads(1));
  Unit unit(10);
  volatile float denormal = 1e-40f;
  unit.update_by_hand();
  EXPECT_GT(denormal * 1.0f, 0.0f);
  // The ticket's callback runs on the pool's own thread, right behind the kernels.
  const auto gate = open_ticket();
  const auto ticket = std::dynamic_pointer_cast<HostTicket>(optimizer.submit(label(1), unit.job(), {gate}));
  std::promise<float> product;
  ticket->when_done([&] { product.set_value(denormal * 1.0f); });
  gate->pass();
  EXPECT_GT(product.get_future().get(), 0.0f);
}

TEST(HostOptimizer, ChosenThreadsLeaveSomeToThoseThatLaunch) {
  EXPECT_EQ(chosen_threads(16, 8, false), 8);
  EXPECT_EQ(chosen_threads(8, 8, false), 7);
  EXPECT_EQ(chosen_threads(1, 1, false), 1);
  EXPECT_EQ(chosen_threads(64, 32, true), 32);  // one on each core: hardware threads are left
  EXPECT_EQ(chosen_threads(16, 16, true), 12);
  EXPECT_EQ(chosen_threads(8, 4, true), 4);
  EXPECT_EQ(chosen_threads(6, 6, true), 3);  // half of the cores at least
  EXPECT_EQ(chosen_threads(2, 2, true), 1);
  EXPECT_EQ(chosen_threads(1, 1, true), 1);
}

#if !defined(__SANITIZE_THREAD__)  // a thread of TBB's may hold the sanitizer's own locks while we fork
TEST(HostOptimizer, ForkedChildNeitherHangsNorJoins) {
  auto optimizer = std::make_unique<HostOptimizer>(threads(2));
  Unit unit(10);
  optimizer->submit(label(1), unit.job(), {})->wait_passed();
  const pid_t child = fork();
  if (child == 0) {
    bool refused = false;
    try {
      optimizer->submit(label(2), unit.job(), {});
    } catch (const UsageError&) {
      refused = true;
    }
    optimizer->idle();
    optimizer->close();
    optimizer.reset();
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif

}  // namespace
}  // namespace noria
