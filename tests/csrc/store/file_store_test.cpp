// Records in files: whole, known as torn, or refused.
#include "store/file_store.h"

#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "../own_folder.h"
#include "base/errors.h"
#include "store/arena.h"
#include "testing/file_faults.h"

namespace noria {
namespace {

namespace fs = std::filesystem;

constexpr Bytes kPart{std::int64_t{16} << 10};

void fill(const Arena& arena, int value) {
  std::memset(arena.data(), value, static_cast<std::size_t>(arena.bytes().count));
}

bool holds(const Arena& arena, int value, Bytes bytes) {
  for (std::int64_t at = 0; at < bytes.count; ++at) {
    if (arena.data()[at] != static_cast<std::byte>(value)) return false;
  }
  return true;
}

bool tells(const std::string& message, const std::string& what, int error) {
  return message.find(what) != std::string::npos && message.find(std::strerror(error)) != std::string::npos;
}

class Store : public testing::TestWithParam<DoorKind> {
 protected:
  void SetUp() override {
    if (GetParam() == DoorKind::uring && !uring_absent_reason().empty()) GTEST_SKIP() << uring_absent_reason();
  }

  FileStore store(int num_folders, std::shared_ptr<FileFaults> faults = std::make_shared<FileFaults>()) const {
    std::vector<std::string> folders;
    for (int folder = 0; folder < num_folders; ++folder) folders.push_back(above + "/" + std::to_string(folder));
    return FileStore(folders, {GetParam(), 4, kPart, std::move(faults)});
  }

  // Opens the only scratch file of folder 0, as another process of this user could.
  int intruder() const {
    for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      if (fs::read_symlink(entry, gone).string().starts_with(above + "/0/")) return open(entry.path().c_str(), O_RDWR);
    }
    return -1;
  }

  const OwnFolder folder;
  const std::string above = folder.path;
  Arena memory{kPart * 10};
};

TEST_P(Store, gives_back_every_record_of_any_size_from_any_number_of_disks) {
  for (int num_folders = 1; num_folders <= 3; ++num_folders) {
    FileStore made = store(num_folders);
    const std::vector<std::int64_t> sizes{1, 4096, 5000, kPart.count, kPart.count + 1, kPart.count * 7 + 123};
    for (const std::int64_t size : sizes) made.add(Bytes{size});
    made.reserve();
    Bytes all;
    for (int record = 0; record < static_cast<int>(sizes.size()); ++record) {
      EXPECT_EQ(made.bytes_of(record), align_up(Bytes{sizes[static_cast<std::size_t>(record)]}, kFileAlignment));
      all += made.bytes_of(record);
      fill(memory, record + 1);
      made.write(record, memory.data());
    }
    EXPECT_EQ(made.file_bytes(), all);
    for (int record = 0; record < static_cast<int>(sizes.size()); ++record) {
      fill(memory, 0xEE);
      made.read(record, memory.data());
      EXPECT_TRUE(holds(memory, record + 1, made.bytes_of(record))) << record;
    }
  }
}

TEST_P(Store, reads_zeros_where_nothing_was_written) {
  FileStore made = store(1);
  made.add(kPart * 3);
  made.reserve();
  fill(memory, 0xEE);
  made.read(0, memory.data());
  EXPECT_TRUE(holds(memory, 0, kPart * 3));
}

TEST_P(Store, reads_what_was_written_through_a_mapping) {
  for (int num_folders = 1; num_folders <= 3; ++num_folders) {
    FileStore made = store(num_folders);
    const std::vector<Bytes> sizes{kFileAlignment, kFileAlignment * 3, kPart, kPart * 7 + kFileAlignment};
    Bytes all;
    for (const Bytes size : sizes) {
      made.add_mapped(size);
      all += size;
    }
    made.reserve();
    EXPECT_EQ(made.file_bytes(), all);
    const auto addresses = std::make_shared<Arena>(Arena::of_addresses(all));
    std::byte* begin = addresses->data();
    for (int record = 0; record < static_cast<int>(sizes.size()); ++record) {
      const Bytes size = sizes[static_cast<std::size_t>(record)];
      made.map(record, addresses, Bytes{begin - addresses->data()});
      for (int round = 0; round < 3; ++round) {
        made.note_mapped_write(record);
        for (std::int64_t at = 0; at < size.count; ++at) begin[at] = static_cast<std::byte>(at / 4096 + record + round);
        for (int again = 0; again < 2; ++again) {
          fill(memory, 0xEE);
          made.read(record, memory.data());
          EXPECT_EQ(std::memcmp(memory.data(), begin, static_cast<std::size_t>(size.count)), 0) << record;
        }
      }
      begin += size.count;
    }
  }
}

TEST_P(Store, finds_what_was_written_through_a_mapping_without_a_word) {
  FileStore made = store(2);
  made.add_mapped(kPart * 4);
  made.reserve();
  const auto addresses = std::make_shared<Arena>(Arena::of_addresses(kPart * 4));
  made.map(0, addresses, Bytes{0});
  made.read(0, memory.data());
  EXPECT_TRUE(holds(memory, 0, kPart * 4));
  addresses->data()[kPart.count * 3] = std::byte{1};
  EXPECT_NE(error_of([&] { made.read(0, memory.data()); }).find("checksum"), std::string::npos);
  made.note_mapped_write(0);
  EXPECT_NE(error_of([&] { made.read(0, memory.data()); }).find("checksum"), std::string::npos);
  made.clear_torn(0);
  made.read(0, memory.data());
  EXPECT_EQ(memory.data()[kPart.count * 3], std::byte{1});
}

TEST_P(Store, knows_records_as_torn_whose_mapped_writes_the_machine_has_lost) {
  const auto faults = std::make_shared<RandomFileFaults>(FileHostility{});
  FileStore made = store(1, faults);
  const auto addresses = std::make_shared<Arena>(Arena::of_addresses(kPart * 6));
  for (int record = 0; record < 3; ++record) made.add_mapped(kPart * 2);
  made.reserve();
  for (int record = 0; record < 3; ++record) made.map(record, addresses, kPart * 2 * record);
  made.read(2, memory.data());
  faults->fail_next(FileWay::write, EIO, 0);
  EXPECT_THROW(made.read(0, memory.data()), MachineError);
  EXPECT_TRUE(made.loss(2).why.empty());
  for (int record = 0; record < 2; ++record) {  // whose writes were lost with it
    EXPECT_EQ(made.loss(record).times, 1);
    made.note_mapped_write(record);  // who says so may only read
    EXPECT_TRUE(tells(error_of([&] { made.read(record, memory.data()); }), "torn", EIO));
    EXPECT_TRUE(tells(error_of([&] { made.check(record, true); }), "torn", EIO));
    std::memset(addresses->data() + (kPart * 2 * record).count, 5, static_cast<std::size_t>(kPart.count * 2));
    made.clear_torn(record);
    made.read(record, memory.data());
    EXPECT_TRUE(holds(memory, 5, kPart * 2));
  }
  made.note_mapped_write(0);
  faults->fail_next(FileWay::write, EIO, 0);
  EXPECT_THROW(made.read(0, memory.data()), MachineError);
  EXPECT_EQ(made.loss(0).times, 2);
  made.read(2, memory.data());
}

TEST_P(Store, hears_of_lost_writes_before_a_record_is_read_in_memory) {
  const auto faults = std::make_shared<RandomFileFaults>(FileHostility{});
  FileStore made = store(1, faults);
  made.add_mapped(kPart);
  made.reserve();
  const auto addresses = std::make_shared<Arena>(Arena::of_addresses(kPart));
  made.map(0, addresses, Bytes{0});
  faults->fail_next(FileWay::write, EIO, 0);
  made.check(0, /*awaits_writes=*/false);
  EXPECT_FALSE(made.is_any_torn());
  EXPECT_THROW(made.check(0, /*awaits_writes=*/true), MachineError);
  EXPECT_TRUE(made.is_any_torn());
}

TEST_P(Store, compares_a_mapped_record_before_it_is_read_in_memory) {
  for (const Bytes size : {kFileAlignment, kPart * 3, kPart * 40 + kFileAlignment}) {
    FileStore made = store(2);
    made.add_mapped(size);
    made.reserve();
    const auto addresses = std::make_shared<Arena>(Arena::of_addresses(size));
    made.map(0, addresses, Bytes{0});
    Arena whole(size);
    made.check(0, true);  // nothing was read yet
    made.read(0, whole.data());
    made.check(0, true);
    std::byte& last = addresses->data()[size.count - 1];
    last = std::byte{1};
    for (int again = 0; again < 2; ++again) {
      EXPECT_NE(error_of([&] { made.check(0, true); }).find("checksum"), std::string::npos);
      EXPECT_TRUE(made.is_any_torn());
    }
    made.note_mapped_write(0);
    made.clear_torn(0);
    EXPECT_FALSE(made.is_any_torn());
    made.check(0, false);  // no read has taken the checksums anew
    made.read(0, whole.data());
    made.check(0, true);
  }
}

TEST_P(Store, reads_a_mapped_record_again_after_a_failure) {
  const auto faults = std::make_shared<RandomFileFaults>(FileHostility{});
  FileStore made = store(1, faults);
  made.add_mapped(kPart * 4);
  made.reserve();
  const auto addresses = std::make_shared<Arena>(Arena::of_addresses(kPart * 4));
  made.map(0, addresses, Bytes{0});
  std::memset(addresses->data(), 5, static_cast<std::size_t>(kPart.count * 4));
  faults->fail_next(FileWay::read, EIO, 2);
  EXPECT_THROW(made.read(0, memory.data()), MachineError);
  made.read(0, memory.data());
  EXPECT_TRUE(holds(memory, 5, kPart * 4));
}

TEST_P(Store, knows_a_record_as_torn_until_it_is_written_again) {
  const auto faults = std::make_shared<RandomFileFaults>(FileHostility{});
  FileStore made = store(1, faults);
  made.add(kPart * 8);
  made.add(kPart);
  made.reserve();
  fill(memory, 1);
  made.write(0, memory.data());
  made.write(1, memory.data());
  faults->fail_next(FileWay::write, EIO, 3);
  fill(memory, 2);
  EXPECT_THROW(made.write(0, memory.data()), MachineError);
  EXPECT_TRUE(tells(error_of([&] { made.read(0, memory.data()); }), "torn", EIO));
  made.read(1, memory.data());
  EXPECT_TRUE(holds(memory, 1, kPart));
  fill(memory, 3);
  made.write(0, memory.data());
  fill(memory, 0);
  made.read(0, memory.data());
  EXPECT_TRUE(holds(memory, 3, kPart * 8));
}

TEST_P(Store, keeps_a_record_whose_read_failed) {
  const auto faults = std::make_shared<RandomFileFaults>(FileHostility{});
  FileStore made = store(1, faults);
  made.add(kPart * 8);
  made.reserve();
  fill(memory, 5);
  made.write(0, memory.data());
  faults->fail_next(FileWay::read, EIO, 2);
  EXPECT_THROW(made.read(0, memory.data()), MachineError);
  made.read(0, memory.data());
  EXPECT_TRUE(holds(memory, 5, kPart * 8));
}

TEST_P(Store, raises_if_one_bit_has_changed_outside) {
  FileStore made = store(1);
  made.add(kPart * 2);
  made.reserve();
  fill(memory, 1);
  made.write(0, memory.data());
  const int file = intruder();
  ASSERT_GE(file, 0);
  const std::byte changed{0x81};
  ASSERT_EQ(pwrite(file, &changed, 1, kPart.count + 77), 1);
  close(file);
  const std::string said = error_of([&] { made.read(0, memory.data()); });
  EXPECT_NE(said.find("checksum"), std::string::npos) << said;
  EXPECT_NE(said.find("offset " + std::to_string(kPart.count)), std::string::npos) << said;
}

TEST_P(Store, raises_if_a_file_was_truncated_outside) {
  FileStore made = store(1);
  made.add(kPart * 2);
  made.reserve();
  made.write(0, memory.data());
  const int file = intruder();
  ASSERT_EQ(ftruncate(file, kPart.count), 0);
  close(file);
  EXPECT_NE(error_of([&] { made.read(0, memory.data()); }).find("truncated"), std::string::npos);
}

TEST_P(Store, reads_and_writes_at_the_same_time) {
  FileStore made = store(2);
  Arena other(kPart * 10);
  made.add(kPart * 10);
  made.add(kPart * 10);
  made.reserve();
  fill(memory, 9);
  made.write(0, memory.data());
  std::thread writer([&] {
    fill(other, 4);
    for (int i = 0; i < 50; ++i) made.write(1, other.data());
  });
  for (int i = 0; i < 50; ++i) {
    fill(memory, 0);
    made.read(0, memory.data());
    EXPECT_TRUE(holds(memory, 9, kPart * 10));
  }
  writer.join();
  made.read(1, memory.data());
  EXPECT_TRUE(holds(memory, 4, kPart * 10));
}

INSTANTIATE_TEST_SUITE_P(both, Store, testing::Values(DoorKind::uring, DoorKind::threads),
                         [](const auto& kind) { return kind.param == DoorKind::uring ? "uring" : "threads"; });

}  // namespace
}  // namespace noria
