// Records at addresses that never change: they have memory while they have a slot.
#include "store/file_home.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../own_folder.h"
#include "base/errors.h"
#include "testing/file_faults.h"

namespace noria {
namespace {

class Home : public testing::Test {
 protected:
  std::unique_ptr<FileHome> make(const std::vector<Bytes>& sizes, int num_slots,
                                 std::shared_ptr<FileFaults> faults = std::make_shared<FileFaults>()) const {
    FileStoreOptions options;
    options.faults = std::move(faults);
    return std::make_unique<FileHome>(std::vector<std::string>{folder.path}, sizes, num_slots, options);
  }

  static std::byte* at(const FileHome& home, int record) {
    return home.addresses()->data() + home.offset_of(record).count;
  }
  static void fill(const FileHome& home, int record, int value) {
    std::memset(at(home, record), value, static_cast<std::size_t>(home.bytes_of(record).count));
  }
  static bool holds(const FileHome& home, int record, int value) {
    for (std::int64_t byte = 0; byte < home.bytes_of(record).count; ++byte) {
      if (at(home, record)[byte] != static_cast<std::byte>(value)) return false;
    }
    return true;
  }

  const OwnFolder folder;
};

TEST_F(Home, gives_each_record_its_bytes_at_its_own_address_in_any_slot) {
  const auto home = make({Bytes{5000}, Bytes{100}, Bytes{70'000}}, 2);
  EXPECT_EQ(home->slot_bytes(), home->bytes_of(2));
  for (int turn = 0; turn < 4; ++turn) {
    for (int record = 0; record < home->num_records(); ++record) {
      const int slot = (turn + record) % 2;
      home->bring(record, slot, false);
      EXPECT_TRUE(holds(*home, record, turn == 0 ? 0 : 10 * turn + record)) << turn;
      fill(*home, record, 10 * (turn + 1) + record);
      home->put_back(record, slot);
    }
  }
}

TEST_F(Home, takes_and_gives_back_slots_and_counts_addresses_as_no_memory) {
  const Bytes before = Arena::all_mapped();
  const auto home = make({Bytes{4096}, Bytes{4096}}, 1);
  EXPECT_EQ(Arena::all_mapped(), before);
  home->add_slot();
  home->bring(0, 0, false);
  home->bring(1, 1, false);
  fill(*home, 1, 7);
  home->put_back(1, 1);
  home->drop_slots(1);
  EXPECT_EQ(home->num_slots(), 1);
  home->bring(1, 0, false);
  EXPECT_TRUE(holds(*home, 1, 7));
}

TEST_F(Home, has_no_memory_at_an_address_without_a_slot) {
  const auto home = make({Bytes{4096}, Bytes{4096}}, 1);
  home->bring(0, 0, false);
  home->bring(1, 0, false);
  EXPECT_DEATH(fill(*home, 0, 1), "");
}

TEST_F(Home, leaves_a_slot_without_a_record_if_a_read_fails_and_gives_zeros_instead_if_asked) {
  const auto faults = std::make_shared<RandomFileFaults>(FileHostility{});
  const auto home = make({Bytes{4096}, Bytes{4096}}, 1, faults);
  home->bring(0, 0, false);
  fill(*home, 0, 3);
  home->put_back(0, 0);
  home->bring(1, 0, false);
  faults->fail_next(FileWay::read, EIO);
  EXPECT_THROW(home->bring(0, 0, false), MachineError);
  home->bring(0, 0, true);
  EXPECT_TRUE(holds(*home, 0, 0));
  home->bring(0, 0, false);
  EXPECT_TRUE(holds(*home, 0, 3));
}

}  // namespace
}  // namespace noria
