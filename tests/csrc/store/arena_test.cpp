// Arenas: who owns what, and in which order it ends.
#include "store/arena.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/errors.h"

namespace noria {
namespace {

// mincore fails with ENOMEM on what is not mapped.
bool mapped(std::byte* at) {
  unsigned char resident = 0;
  return mincore(at, 1, &resident) == 0;
}

// Knows only registrations, and whether the memory was still there when they ended.
class Registry final : public Backend {
 public:
  std::string register_home(std::byte* memory, Bytes bytes, HomeUse use) override {
    events.push_back("register " + std::to_string(bytes.count) + (mapped(memory) ? "" : " unmapped"));
    return use == HomeUse::copies ? staged_because : "";
  }
  void unregister_home(std::byte* memory) override {
    events.push_back(mapped(memory) ? "unregister" : "unregister unmapped");
    if (fails) throw MachineError("unregister refused");
  }
  std::vector<std::string> events;
  bool fails = false;
  std::string staged_because;

  std::string name() const override { return "registry"; }
  std::byte* allocate(Bytes) override { return nullptr; }
  void free(std::byte*) override {}
  std::byte* allocate_shared(Bytes) override { return nullptr; }
  SharedMemory shared(std::byte*) const override { return {}; }
  std::byte* open_shared(const SharedMemory&) override { return nullptr; }
  void close_shared(std::byte*) override {}
  Bytes allocated() const override { return {}; }
  Bytes capacity() const override { return {}; }
  std::int64_t num_allocations() const override { return 0; }
  std::int64_t num_events() const override { return 0; }
  std::byte* device_address(std::byte* home_memory) const override { return home_memory; }
  Ticket submit(const OpLabel&, Transfer, std::vector<Ticket>) override { return nullptr; }
  Ticket open(const OpLabel&, Bytes) override { return nullptr; }
  void give(const Ticket&, Stream) override {}
  void give_failed(const Ticket&, std::exception_ptr) override {}
  void wait(const std::vector<Ticket>&, Stream, const OpLabel&) override {}
  void idle() override {}
  void close() override {}
  LaneStats stats(Lane) const override { return {}; }
  void begin_counting(OpId) override {}
  LaneStats counted(Lane) const override { return {}; }
  void set_update_time(std::shared_ptr<UpdateTime>) override {}
  void set_trace(std::shared_ptr<Trace>) override {}
  bool pins() const override { return true; }
  bool poisons() const override { return false; }
};

TEST(Arena, TakesWholePagesAlignedForHugeOnesAndNothingBehindThem) {
  const std::int64_t page = sysconf(_SC_PAGESIZE);
  for (const std::int64_t bytes :
       std::vector<std::int64_t>{1, page, page + 1, 2 * 1024 * 1024 - 1, 5 * 1024 * 1024 + 512}) {
    const Arena arena(Bytes{bytes});
    EXPECT_EQ(arena.bytes(), Bytes{bytes});
    EXPECT_EQ(arena.mapped_bytes(), align_up(Bytes{bytes}, Bytes{page}));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(arena.data()) % (2 * 1024 * 1024), 0u);
    EXPECT_TRUE(mapped(arena.data()));
    EXPECT_TRUE(mapped(arena.data() + arena.mapped_bytes().count - page));
    arena.data()[0] = std::byte{1};
    arena.data()[bytes - 1] = std::byte{1};
  }
}

TEST(Arena, MovedFromIsEmptyAndTheMappingHasOneOwner) {
  Arena first(Bytes{10'000});
  std::byte* const data = first.data();
  Arena second(std::move(first));
  EXPECT_EQ(first.data(), nullptr);  // NOLINT(bugprone-use-after-move): that is the promise
  EXPECT_EQ(first.bytes(), Bytes{0});
  EXPECT_EQ(first.mapped_bytes(), Bytes{0});
  EXPECT_EQ(second.data(), data);
  Arena third(Bytes{20'000});
  std::byte* const replaced = third.data();
  third = std::move(second);
  EXPECT_FALSE(mapped(replaced));
  EXPECT_TRUE(mapped(data));
  third.close();
  third.close();
  EXPECT_FALSE(mapped(data));
  EXPECT_EQ(third.data(), nullptr);
}

TEST(Arena, RegistrationEndsBeforeTheMapping) {
  const auto backend = std::make_shared<Registry>();
  {
    Arena arena(Bytes{10'000});
    arena.register_with(backend);
    EXPECT_TRUE(arena.registered());
    EXPECT_THROW(arena.register_with(backend), InvariantError);
    Arena moved(std::move(arena));
    EXPECT_TRUE(moved.registered());
    EXPECT_FALSE(arena.registered());  // NOLINT(bugprone-use-after-move)
  }
  EXPECT_EQ(backend->events, (std::vector<std::string>{"register 10000", "unregister"}));
  EXPECT_EQ(backend.use_count(), 1);
}

TEST(Arena, MemoryIsGivenBackEvenWhenUnregisteringFails) {
  const auto backend = std::make_shared<Registry>();
  backend->fails = true;
  Arena arena(Bytes{10'000});
  std::byte* const data = arena.data();
  arena.register_with(backend);
  EXPECT_THROW(arena.close(), MachineError);
  EXPECT_FALSE(mapped(data));
  EXPECT_EQ(arena.data(), nullptr);

  Arena silent(Bytes{10'000});
  silent.register_with(backend);
  silent = Arena();  // a destructor that does not throw
  EXPECT_EQ(silent.data(), nullptr);
}

TEST(Arena, ForkedChildKeepsItsHandsOffWhatLiesThereNow) {
  const auto backend = std::make_shared<Registry>();
  Arena arena(Bytes{10'000});
  arena.register_with(backend);
  const pid_t child = fork();
  if (child == 0) {
    std::byte* const at = arena.data();
    // Fails where a sanitizer has mapped something of its own there: that must stay too.
    mmap(at, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    arena.close();
    const bool kept = mapped(at) && backend->events.size() == 1;
    _exit(kept ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(mapped(arena.data()));
}

TEST(Arena, SaysWhyItIsStagedAndIsRegisteredAllTheSame) {
  const auto backend = std::make_shared<Registry>();
  backend->staged_because = "the driver is short of it";
  Arena weights(Bytes{10'000}), gradients(Bytes{10'000});
  EXPECT_EQ(weights.register_with(backend, HomeUse::copies), "the driver is short of it");
  EXPECT_EQ(gradients.register_with(backend), "");
  EXPECT_TRUE(weights.registered());
  weights.close();
  EXPECT_EQ(backend->events.back(), "unregister");
}

TEST(Arena, PopulationStopsWhenTheOneWhoIsToldThrows) {
  Arena arena(Bytes{std::int64_t{64} << 20});
  EXPECT_THROW(arena.populate([](Bytes) { throw MachineError("enough"); }), MachineError);
  Bytes last;
  arena.populate([&last](Bytes populated) { last = populated; }, {3, true});
  EXPECT_EQ(last, arena.bytes());
}

TEST(Arena, RefusalNamesTheSizes) {
  try {
    const Arena arena(Bytes{std::int64_t{1} << 60});
    FAIL() << "an exbibyte was given";
  } catch (const MachineError& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(std::int64_t{1} << 60)), std::string::npos);
  }
}

constexpr Bytes kPage{4096};

// Three pages, then four that lie elsewhere, then one, then two that lie elsewhere.
Arena with_gaps() { return Arena(kPage * 10, {{kPage * 3, kPage * 7}, {kPage * 8, kPage * 10}}); }

void map_zeros(const Arena& arena) {
  for (const ByteRange& range : arena.elsewhere()) {
    ASSERT_NE(mmap(arena.data() + range.begin.count, static_cast<std::size_t>(range.bytes().count),
                   PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
              MAP_FAILED);
  }
}

TEST(ArenaWithGaps, takes_and_registers_only_what_lies_in_memory) {
  const Bytes before = Arena::all_mapped();
  const auto registry = std::make_shared<Registry>();
  {
    Arena arena = with_gaps();
    EXPECT_EQ(arena.bytes(), kPage * 10);
    EXPECT_EQ(arena.memory_bytes(), kPage * 4);
    EXPECT_EQ(Arena::all_mapped() - before, kPage * 4);
    Bytes told;
    arena.populate([&](Bytes populated) { told = populated; });
    EXPECT_EQ(told, kPage * 4);
    EXPECT_EQ(arena.register_with(registry), "");
    EXPECT_EQ(registry->events, (std::vector<std::string>{"register 12288", "register 4096"}));
    arena.data()[0] = arena.data()[kPage.count * 7] = std::byte{1};
  }
  EXPECT_EQ(registry->events.size(), 4U);
  EXPECT_EQ(registry->events.back(), "unregister");
  EXPECT_EQ(Arena::all_mapped(), before);
}

TEST(ArenaWithGaps, ends_all_registrations_even_if_one_cannot_be_ended) {
  const auto registry = std::make_shared<Registry>();
  Arena arena = with_gaps();
  arena.register_with(registry);
  registry->fails = true;
  EXPECT_THROW(arena.close(), MachineError);
  EXPECT_EQ(registry->events.size(), 4U);
  EXPECT_EQ(arena.data(), nullptr);
}

TEST(ArenaWithGaps, takes_in_all_ranges_or_none) {
  const Bytes before = Arena::all_mapped();
  Arena arena = with_gaps();
  map_zeros(arena);
  arena.data()[kPage.count * 3] = std::byte{9};
  const auto fill = [](int range, std::byte* memory) {
    if (range == 1) throw MachineError("a range that cannot be read");
    memory[0] = std::byte{1};
  };
  EXPECT_THROW(arena.take_in(fill), MachineError);
  EXPECT_EQ(arena.elsewhere().size(), 2U);
  EXPECT_EQ(arena.data()[kPage.count * 3], std::byte{9});
  arena.take_in([](int range, std::byte* memory) { memory[4095] = static_cast<std::byte>(range + 1); });
  EXPECT_EQ(arena.memory_bytes(), kPage * 10);
  EXPECT_EQ(Arena::all_mapped() - before, kPage * 10);
  EXPECT_EQ(arena.data()[kPage.count * 4 - 1], std::byte{1});
  EXPECT_EQ(arena.data()[kPage.count * 9 - 1], std::byte{2});
  EXPECT_EQ(arena.data()[kPage.count * 3], std::byte{0});
}

}  // namespace
}  // namespace noria
