// The window's account: ranges never overlap, what is released can be taken again, memory is taken once.
#include "store/leases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "base/errors.h"

namespace noria {
namespace {

constexpr std::int64_t kCell = 512;
constexpr std::int64_t kCells = 16;

std::shared_ptr<Backend> backend() { return make_host_backend({Bytes{1 << 20}}); }

TEST(leases, keep_the_account_of_a_map_of_cells) {
  const auto machine = backend();
  Leases leases(machine, Bytes{kCells * kCell});
  struct Lease {
    std::int64_t cells;
    bool is_weights;
  };
  std::map<std::int64_t, Lease> twin;  // by first cell
  std::int64_t peak = 0;
  int peak_units = 0;
  std::mt19937 random(1);  // NOLINT(cert-msc51-cpp): the same every time
  int num_taken = 0, num_refused = 0;
  for (int i = 0; i < 5000; ++i) {
    const auto first = static_cast<std::int64_t>(random() % kCells);
    const auto found = twin.find(first);
    if (found != twin.end()) {
      leases.release(Bytes{first * kCell});
      twin.erase(found);
      continue;
    }
    const Lease lease{1 + static_cast<std::int64_t>(random() % 5), random() % 2 == 0};
    const bool fits = first + lease.cells <= kCells && std::none_of(twin.begin(), twin.end(), [&](const auto& other) {
                        return other.first < first + lease.cells && first < other.first + other.second.cells;
                      });
    if (!fits) {
      EXPECT_THROW(leases.take(Bytes{first * kCell}, Bytes{lease.cells * kCell}, lease.is_weights), InvariantError);
      ++num_refused;
      continue;
    }
    EXPECT_EQ(leases.take(Bytes{first * kCell}, Bytes{lease.cells * kCell}, lease.is_weights),
              leases.at(Bytes{0}) + first * kCell);
    ++num_taken;
    twin.emplace(first, lease);
    peak = std::max(peak, (first + lease.cells) * kCell);
    const auto num_units = static_cast<int>(
        std::count_if(twin.begin(), twin.end(), [](const auto& each) { return each.second.is_weights; }));
    peak_units = std::max(peak_units, num_units);
    EXPECT_EQ(leases.num_units(), num_units);
    EXPECT_EQ(leases.num_leases(), twin.size());
    EXPECT_EQ(leases.peak(), Bytes{peak});
    EXPECT_EQ(leases.peak_units(), peak_units);
  }
  EXPECT_GT(num_taken, 500);
  EXPECT_GT(num_refused, 500);
  EXPECT_EQ(machine->num_allocations(), 1);
}

TEST(leases, refuse_to_release_what_was_not_taken) {
  Leases leases(backend(), Bytes{kCells * kCell});
  leases.take(Bytes{0}, Bytes{2 * kCell}, true);
  EXPECT_THROW(leases.release(Bytes{kCell}), InvariantError);
  leases.release(Bytes{0});
  EXPECT_THROW(leases.release(Bytes{0}), InvariantError);
}

TEST(leases, give_their_memory_back) {
  const auto machine = backend();
  {
    const Leases leases(machine, Bytes{kCells * kCell});
    EXPECT_EQ(machine->allocated(), Bytes{kCells * kCell});
  }
  EXPECT_EQ(machine->allocated(), Bytes{0});
}

TEST(leases, give_their_memory_up_for_a_while) {
  const auto machine = backend();
  Leases leases(machine, Bytes{kCells * kCell});
  leases.take(Bytes{0}, Bytes{kCell}, true);
  EXPECT_THROW(leases.give_up(), InvariantError);
  leases.release(Bytes{0});
  leases.give_up();
  EXPECT_EQ(machine->allocated(), Bytes{0});
  EXPECT_EQ(leases.arena_bytes(), Bytes{0});
  EXPECT_THROW(leases.take(Bytes{0}, Bytes{kCell}, true), InvariantError);
  std::byte* const other = machine->allocate(Bytes{1 << 20});
  EXPECT_THROW(leases.take_again(), MachineError);
  EXPECT_FALSE(leases.is_taken());
  machine->free(other);
  leases.take_again();
  leases.take_again();
  EXPECT_EQ(machine->allocated(), Bytes{kCells * kCell});
  EXPECT_NE(leases.take(Bytes{0}, Bytes{kCell}, true), nullptr);
}

TEST(leases, are_refused_by_a_device_that_has_no_room) {
  const auto machine = backend();
  EXPECT_THROW(Leases(machine, Bytes{2 << 20}), MachineError);
  EXPECT_EQ(machine->allocated(), Bytes{0});
}

}  // namespace
}  // namespace noria
