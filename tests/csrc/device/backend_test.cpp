// The essentials of device/backend.h on the host backend, without Python: these run under the sanitizers.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/errors.h"
#include "device/host_backend.h"
#include "device/host_lane.h"
#include "device/host_memory.h"
#include "device/host_ticket.h"
#include "device/lane_ledger.h"
#include "device/timing.h"
#include "testing/slow_pace.h"

namespace noria {
namespace {

constexpr Bytes kSize{4096};

OpLabel label(Lane lane, Verb verb, std::int64_t op = -1) { return {OpId(op), lane, verb, UnitId(0)}; }
const OpLabel kFetch = label(Lane::fetch, Verb::fetch);
const OpLabel kDrain = label(Lane::drain, Verb::drain);
const OpLabel kPeer = label(Lane::peer, Verb::offload);
const OpLabel kForward = label(Lane::compute, Verb::forward);
const OpLabel kBackward = label(Lane::compute, Verb::backward);
const OpLabel kUpdate = label(Lane::update, Verb::update);

std::exception_ptr reason(const char* why) { return std::make_exception_ptr(MachineError(why)); }

std::string failure_of(const Ticket& ticket) {
  try {
    ticket->wait_passed();
  } catch (const MachineError& error) {
    return error.what();
  }
  return "";
}

std::vector<std::byte> filled(int value) {
  return std::vector<std::byte>(static_cast<std::size_t>(kSize.count), std::byte(value));
}

HostBackendOptions roomy() { return {Bytes{1 << 20}}; }

TEST(HostTicketTest, callbacks_run_once_and_in_order_also_when_added_late) {
  HostTicket ticket(kUpdate);
  std::vector<int> ran;
  ticket.when_done([&] { ran.push_back(1); });
  ticket.when_issued([&] { ran.push_back(2); });
  EXPECT_FALSE(ticket.passed());
  ticket.pass();
  ticket.when_done([&] { ran.push_back(3); });
  EXPECT_EQ(ran, (std::vector<int>{1, 2, 3}));
  EXPECT_THROW(ticket.pass(), InvariantError);
}

TEST(HostTicketTest, every_waiter_hears_the_giver_s_failure) {
  auto ticket = std::make_shared<HostTicket>(kUpdate);
  std::vector<std::future<std::string>> waiting;
  for (int i = 0; i < 4; ++i)
    waiting.push_back(std::async(std::launch::async, [ticket] { return failure_of(ticket); }));
  ticket->fail(reason("lost"));
  for (auto& waiter : waiting) EXPECT_EQ(waiter.get(), "lost");
  EXPECT_TRUE(ticket->passed());
}

TEST(HostLaneTest, runs_in_order_from_many_submitters_and_abandons_the_rest_once) {
  std::atomic<int> ran = 0, abandoned = 0;
  auto gate = std::make_shared<HostTicket>(kUpdate);
  HostLane lane("test");
  std::vector<std::thread> submitters;
  std::vector<std::vector<int>> seen(4);  // by submitter; touched by the lane's thread only
  for (int s = 0; s < 4; ++s) {
    submitters.emplace_back([&, s] {
      for (int i = 0; i < 100; ++i) {
        lane.enqueue({[&, s, i] { seen[static_cast<std::size_t>(s)].push_back(i); }, [](std::exception_ptr) {}});
      }
    });
  }
  for (auto& submitter : submitters) submitter.join();
  lane.idle();
  for (const auto& order : seen) {
    ASSERT_EQ(order.size(), 100u);
    EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  }
  for (int i = 0; i < 10; ++i) {
    lane.enqueue({[&, i] {
                    if (i > 0) return void(++ran);
                    try {
                      lane.await_issued(gate);
                    } catch (const MachineError&) {
                      ++abandoned;
                    }
                  },
                  [&](std::exception_ptr) { ++abandoned; }});
  }
  lane.close();
  EXPECT_EQ(ran, 0);
  EXPECT_EQ(abandoned, 10);
  gate->pass();  // the object that is called back now is gone, and that is fine
}

TEST(HostLaneTest, may_be_destroyed_by_its_own_thread) {
  auto lane = std::make_shared<HostLane>("test");
  std::promise<void> destroyed;
  HostLane& queue = *lane;
  std::promise<void> released;
  queue.enqueue({[&destroyed, wait = released.get_future().share(), owner = std::move(lane)]() mutable {
                   wait.wait();
                   owner.reset();
                   destroyed.set_value();
                 },
                 [](std::exception_ptr) {}});
  released.set_value();
  destroyed.get_future().wait();
}

TEST(HostLaneTest, two_closers_both_return_when_the_thread_has_ended) {
  HostLane lane("test");
  std::promise<void> may_end;
  lane.enqueue({[&] { may_end.get_future().wait(); }, [](std::exception_ptr) {}});
  auto other = std::async(std::launch::async, [&] { lane.close(); });
  may_end.set_value();
  lane.close();
  other.get();
}

TEST(HostBackendTest, capacity_is_a_cap_and_bytes_are_exact) {
  HostBackend backend(HostBackendOptions{Bytes{1000}});
  std::byte* memory = backend.allocate(Bytes{999});
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % (2u << 20), 0u);
  std::memset(memory, 1, 999);
  EXPECT_THROW(backend.allocate(Bytes{2}), MachineError);
  EXPECT_EQ(backend.allocated(), Bytes{999});
  EXPECT_EQ(backend.num_allocations(), 1);
  backend.free(memory);
  EXPECT_EQ(backend.allocated(), Bytes{0});
  EXPECT_THROW(backend.free(memory), InvariantError);
}

TEST(HostBackendTest, another_process_reads_and_writes_shared_memory) {
  HostBackend backend(roomy());
  std::byte* memory = backend.allocate_shared(kSize);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % (2u << 20), 0u);
  EXPECT_EQ(backend.allocated(), kSize);
  const SharedMemory told = backend.shared(memory);
  EXPECT_EQ(told.bytes, kSize);
  memory[1] = std::byte{1};
  const pid_t child = fork();
  if (child == 0) {
    std::byte* theirs = map_shared_pages(told.fd, told.bytes);
    if (theirs == nullptr || theirs == memory || theirs[1] != std::byte{1}) _exit(1);
    theirs[2] = std::byte{2};
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(memory[2], std::byte{2});
  EXPECT_EQ(fcntl(told.fd, F_GETFD), FD_CLOEXEC);
  backend.free(memory);
  EXPECT_EQ(fcntl(told.fd, F_GETFD), -1);
  EXPECT_EQ(backend.allocated(), Bytes{0});
}

TEST(HostBackendTest, opened_memory_is_no_allocation_and_outlives_the_descriptor) {
  HostBackend lender(roomy()), borrower(HostBackendOptions{Bytes{0}});
  std::byte* memory = lender.allocate_shared(kSize);
  SharedMemory told = lender.shared(memory);
  std::byte* opened = borrower.open_shared(told);
  lender.free(memory);
  opened[0] = std::byte{1};
  borrower.close_shared(opened);
  EXPECT_THROW(borrower.close_shared(opened), InvariantError);
  EXPECT_THROW(borrower.open_shared(told), MachineError);  // the descriptor is gone
  memory = lender.allocate_shared(kSize);
  told = lender.shared(memory);
  told.bytes += Bytes{1};
  EXPECT_THROW(borrower.open_shared(told), MachineError);
  borrower.open_shared(lender.shared(memory));  // closed with the backend
  lender.free(memory);
}

TEST(HostBackendTest, whole_pages_of_shared_memory_go_back_to_the_machine_before_the_rest) {
  const Bytes page{sysconf(_SC_PAGESIZE)};
  HostBackend lender(HostBackendOptions{page * 8}), borrower(HostBackendOptions{Bytes{0}});
  std::byte* memory = lender.allocate_shared(page * 8);
  std::byte* opened = borrower.open_shared(lender.shared(memory));
  std::memset(memory, 1, static_cast<std::size_t>(page.count * 8));
  EXPECT_EQ(lender.discard_shared(memory, page + Bytes{1}, page * 3), page * 2);
  EXPECT_EQ(lender.discard_shared(memory, page * 6 + Bytes{1}, page - Bytes{2}), Bytes{0});
  EXPECT_EQ(lender.allocated(), page * 6);
  for (std::int64_t i = 0; i < page.count * 8; ++i) {
    EXPECT_EQ(opened[i], std::byte(i / page.count == 2 || i / page.count == 3 ? 0 : 1)) << i;
  }
  std::byte* other = lender.allocate(page * 2);
  lender.free(memory);
  EXPECT_EQ(lender.allocated(), page * 2);
  lender.free(other);
  EXPECT_EQ(lender.allocated(), Bytes{0});
}

TEST(HostBackendTest, hostile_swaps_with_a_peer_keep_every_byte) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    HostBackendOptions options = roomy();
    options.pace = slow({seed, 50, {}, true});
    HostBackend lender(roomy()), backend(options);
    std::byte* lent = lender.allocate_shared(kSize);
    std::byte* opened = backend.open_shared(lender.shared(lent));
    std::byte* window = backend.allocate(kSize);
    const Bytes half{kSize.count / 2};
    std::vector<std::vector<std::byte>> homes, results;
    for (int i = 0; i < 20; ++i) {
      homes.push_back(filled(i + 1));
      results.push_back(filled(0));
    }
    std::vector<Ticket> taken;
    for (std::size_t i = 0; i < homes.size(); ++i) {
      const Ticket arrived = backend.submit(kFetch, {{{window, homes[i].data(), kSize}}, {}}, taken);
      const Ticket there = backend.submit(
          kPeer, {{{opened, window, half, 1}, {opened + half.count, window + half.count, half, 2}}, {}}, {arrived});
      const Ticket vacated = backend.submit(label(Lane::fetch, Verb::poison), {{}, {{window, kSize}}}, {there});
      const Ticket back = backend.submit(kPeer, {{{window, opened, kSize, 3}}, {}}, {vacated});
      taken = {backend.submit(kDrain, {{{results[i].data(), window, kSize}}, {}}, {back})};
    }
    taken.front()->wait_passed();
    EXPECT_EQ(results, homes);
    EXPECT_EQ(backend.stats(Lane::peer).num_ops, 40);
    backend.close();
    backend.free(window);
    lender.free(lent);
  }
}

TEST(HostBackendTest, a_peer_copy_waits_fails_and_is_closed_like_any_other) {
  HostBackend backend(roomy());
  auto late = std::make_shared<HostTicket>(kUpdate), never = std::make_shared<HostTicket>(kUpdate);
  const Ticket failed = backend.submit(kPeer, {}, {late});
  const Ticket behind = backend.submit(kPeer, {}, {});
  EXPECT_FALSE(behind->passed());
  late->fail(reason("lost"));
  EXPECT_EQ(failure_of(failed), "lost");
  EXPECT_EQ(failure_of(behind), "");
  backend.idle();
  const Ticket queued = backend.submit(kPeer, {}, {never});
  backend.close();
  EXPECT_NE(failure_of(queued), "");
}

TEST(TimingTest, a_transfer_takes_as_long_as_its_slowest_link_and_its_fills) {
  const LaneLimit limit{1.0, 100};
  std::byte* at = nullptr;
  Transfer transfer;
  EXPECT_EQ(least_duration_ns(limit, transfer), 100'000);
  transfer.copies = {{at, at, Bytes{3000}, 1}, {at, at, Bytes{5000}, 2}, {at, at, Bytes{4000}, 1}, {at, at, Bytes{1}}};
  EXPECT_EQ(least_duration_ns(limit, transfer), least_duration_ns(limit, Bytes{7000}));
  transfer.poison = {{at, Bytes{10}}};
  EXPECT_EQ(least_duration_ns(limit, transfer), least_duration_ns(limit, Bytes{7010}));
  const std::map<int, LaneLimit> links{{2, {0.5, 200}}};
  EXPECT_EQ(least_duration_ns(limit, transfer, links), least_duration_ns(links.at(2), Bytes{5010}));
  for (CopySpan& copy : transfer.copies) copy.link = 0;
  EXPECT_EQ(least_duration_ns(limit, transfer), least_duration_ns(limit, transfer.bytes()));
}

TEST(HostBackendTest, hostile_lanes_and_streams_never_outrun_a_ticket) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    HostBackendOptions options = roomy();
    options.pace = slow({seed, 50, {{Verb::forward, 20}}, true});
    HostBackend backend(options);
    Stream stream = backend.create_stream();
    std::byte* window = backend.allocate(kSize);
    std::byte* scratch = backend.allocate(kSize);
    const auto size = static_cast<std::size_t>(kSize.count);
    std::vector<std::vector<std::byte>> homes, results;
    for (int i = 0; i < 20; ++i) {
      homes.push_back(filled(i + 1));
      results.push_back(filled(0));
    }
    std::vector<Ticket> read, taken;
    for (std::size_t i = 0; i < homes.size(); ++i) {
      Transfer in, out;
      in.copies.push_back({window, homes[i].data(), kSize});
      out.copies.push_back({results[i].data(), scratch, kSize});
      const Ticket arrived = backend.submit(kFetch, std::move(in), read);
      const Ticket visit = backend.open(kForward, {});
      taken.push_back(arrived);
      backend.wait(taken, stream, kForward);
      backend.enqueue(stream, [=] { std::memcpy(scratch, window, size); });
      backend.give(visit, stream);
      read = {visit};
      taken = {backend.submit(kDrain, std::move(out), {visit})};
    }
    taken.front()->wait_passed();
    EXPECT_EQ(results, homes);
    backend.close();
    backend.free(window);
    backend.free(scratch);
  }
}

TEST(HostBackendTest, a_failed_wait_fails_the_op_and_the_lane_goes_on) {
  HostBackend backend(roomy());
  auto late = std::make_shared<HostTicket>(kUpdate);
  const Ticket failed = backend.submit(kFetch, {}, {late});
  const Ticket behind = backend.submit(kDrain, {}, {failed});
  const Ticket after = backend.submit(kFetch, {}, {});
  late->fail(reason("lost"));
  EXPECT_EQ(failure_of(behind), "lost");
  EXPECT_EQ(failure_of(after), "");
  EXPECT_THROW(backend.wait({failed}, Stream(), kForward), MachineError);
}

TEST(HostBackendTest, give_failed_releases_the_drain) {
  HostBackend backend(roomy());
  const Ticket visit = backend.open(kBackward, {});
  const Ticket drain = backend.submit(kDrain, {}, {visit});
  backend.give_failed(visit, reason("the visit raised"));
  EXPECT_EQ(failure_of(drain), "the visit raised");
}

TEST(HostBackendTest, close_fails_what_is_queued_while_others_submit_and_wait) {
  HostBackend backend(roomy());
  auto never = std::make_shared<HostTicket>(kUpdate);
  const Ticket first = backend.submit(kFetch, {}, {never});
  std::promise<void> submitting;
  auto submitter = std::async(std::launch::async, [&] {
    std::vector<Ticket> tickets;
    for (int i = 0; i < 1000; ++i) {
      tickets.push_back(backend.submit(kFetch, {}, {}));
      if (i == 10) submitting.set_value();
    }
    int failed = 0;
    for (const Ticket& ticket : tickets) failed += !failure_of(ticket).empty();
    return failed;
  });
  submitting.get_future().wait();
  backend.close();
  EXPECT_NE(failure_of(first), "");
  EXPECT_EQ(submitter.get(), 1000);
  backend.close();
}

TEST(HostBackendTest, stats_and_spans_are_there_when_the_ticket_has_passed) {
  HostBackendOptions options = roomy();
  options.pace = slow({}, {{{Lane::fetch, {1.0, 100}}}});
  HostBackend backend(options);
  auto trace = std::make_shared<Trace>(100);
  backend.set_trace(trace);
  std::byte* memory = backend.allocate(kSize);
  const auto home = filled(3);
  for (int i = 1; i <= 10; ++i) {
    Transfer in;
    in.copies.push_back({memory, home.data(), kSize});
    backend.submit(label(Lane::fetch, Verb::fetch, i), std::move(in), {})->wait_passed();
    const LaneStats stats = backend.stats(Lane::fetch);
    EXPECT_EQ(stats.num_ops, i);
    EXPECT_EQ(stats.bytes, kSize * i);
    EXPECT_GE(stats.busy_us, i * least_duration_ns({1.0, 100}, kSize) / 1000);
    EXPECT_EQ(trace->spans().size(), static_cast<std::size_t>(i));
  }
  backend.free(memory);
}

}  // namespace
}  // namespace noria
