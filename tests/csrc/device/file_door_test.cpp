// Doors to files: both keep one contract, also if the machine fails.
#include "device/file_door.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../own_folder.h"
#include "base/checksum.h"
#include "base/errors.h"
#include "device/scratch_file.h"
#include "store/arena.h"
#include "testing/file_faults.h"

namespace noria {
namespace {

namespace fs = std::filesystem;

constexpr Bytes kPart{std::int64_t{64} << 10};
constexpr int kNumParts = 40;

struct World {
  std::string door;   // "uring", "threads"
  std::string above;  // where the folder is
};

class Door : public testing::TestWithParam<World> {
 protected:
  void SetUp() override {
    if (GetParam().door == "uring" && !uring_absent_reason().empty()) GTEST_SKIP() << uring_absent_reason();
    if (access(GetParam().above.c_str(), W_OK) != 0) GTEST_SKIP() << GetParam().above << " is not there";
    folder = std::make_unique<OwnFolder>(GetParam().above);
    file = std::make_unique<ScratchFile>(folder->path);
    file->reserve(kPart * kNumParts);
    memory = Arena(kPart * kNumParts);
    came = Arena(kPart * kNumParts);
    std::mt19937_64 random(7);
    for (std::int64_t at = 0; at < memory.bytes().count; at += 8) {
      const std::uint64_t word = random();
      std::memcpy(memory.data() + at, &word, 8);
    }
  }

  std::unique_ptr<FileDoor> door(const std::shared_ptr<FileFaults>& faults = std::make_shared<FileFaults>()) {
    const FileDoorOptions options{4, faults};
    return GetParam().door == "uring" ? make_uring_door(options) : make_thread_door(options);
  }

  std::vector<FilePart> parts(const Arena& arena) const {
    std::vector<FilePart> all;
    for (int part = 0; part < kNumParts; ++part) {
      all.push_back({&file->to_use(), kPart * part, arena.data() + (kPart * part).count, kPart});
    }
    return all;
  }

  bool is_equal() const {
    return std::memcmp(memory.data(), came.data(), static_cast<std::size_t>(memory.bytes().count)) == 0;
  }

  std::unique_ptr<OwnFolder> folder;
  std::unique_ptr<ScratchFile> file;
  Arena memory, came;
};

TEST_P(Door, reads_what_was_written_and_sums_both) {
  const auto opened = door();
  auto there = parts(memory), back = parts(came);
  opened->run(FileWay::write, there);
  EXPECT_FALSE(is_equal());
  opened->run(FileWay::read, back);
  EXPECT_TRUE(is_equal());
  for (int part = 0; part < kNumParts; ++part) {
    EXPECT_EQ(there[part].sum, checksum(there[part].memory, kPart));
    EXPECT_EQ(there[part].sum, back[part].sum);
  }
}

TEST_P(Door, uses_memory_that_it_expects) {
  const auto opened = door();
  const std::string refused = opened->expect_memory(memory.data(), memory.bytes());  // a limit may refuse it
  auto there = parts(memory), back = parts(came);
  opened->run(FileWay::write, there);  // from that memory
  opened->run(FileWay::read, back);    // to other memory
  EXPECT_TRUE(is_equal()) << refused;
  opened->expect_memory(nullptr, {});
  opened->run(FileWay::write, there);
}

TEST_P(Door, asks_again_after_short_answers_and_interruptions) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    const auto faults = std::make_shared<RandomFileFaults>(FileHostility{seed, 0.5, 0.2, 100});
    const auto opened = door(faults);
    std::memset(came.data(), 0, static_cast<std::size_t>(came.bytes().count));
    auto there = parts(memory), back = parts(came);
    opened->run(FileWay::write, there);
    opened->run(FileWay::read, back);
    EXPECT_TRUE(is_equal());
    EXPECT_GT(faults->num_faults(), 20);
  }
}

TEST_P(Door, throws_what_the_machine_answers_and_works_again) {
  const auto faults = std::make_shared<RandomFileFaults>(FileHostility{});
  const auto opened = door(faults);
  for (const FileWay way : {FileWay::write, FileWay::read}) {
    for (const int error : {EIO, ENOSPC, EINVAL, EDQUOT}) {
      auto some = parts(way == FileWay::write ? memory : came);
      faults->fail_next(way, error, 7);
      const std::string said = error_of([&] { opened->run(way, some); });
      EXPECT_NE(said.find(std::strerror(error)), std::string::npos) << said;
      EXPECT_NE(said.find(folder->path), std::string::npos) << said;
      opened->run(way, some);
    }
  }
  EXPECT_TRUE(is_equal());
}

TEST_P(Door, gives_up_if_asking_again_never_helps) {
  const auto faults = std::make_shared<RandomFileFaults>(FileHostility{});
  const auto opened = door(faults);
  faults->fail_next(FileWay::write, EAGAIN, 0, 1 << 30);
  std::vector<FilePart> one{parts(memory).front()};
  const std::string said = error_of([&] { opened->run(FileWay::write, one); });
  EXPECT_NE(said.find(std::strerror(EAGAIN)), std::string::npos) << said;
}

TEST_P(Door, says_that_a_file_was_truncated) {
  const auto opened = door();
  auto there = parts(memory), back = parts(came);
  opened->run(FileWay::write, there);
  ASSERT_EQ(ftruncate(file->to_use().descriptor, (kPart * 20).count), 0);
  const std::string said = error_of([&] { opened->run(FileWay::read, back); });
  EXPECT_NE(said.find("truncated"), std::string::npos) << said;
}

TEST_P(Door, refuses_a_forked_child) {
  const auto opened = door();
  const pid_t child = fork();
  if (child == 0) {
    std::vector<FilePart> one{parts(memory).front()};
    _exit(error_of([&] { opened->run(FileWay::write, one); }).find("parent") == std::string::npos ? 1 : 0);
  }
  int status = 1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_P(Door, refuses_what_is_not_aligned_if_reads_are_direct) {
  if (!file->to_use().is_direct) GTEST_SKIP() << file->why_not_direct();
  const auto opened = door();
  std::vector<FilePart> one{parts(memory).front()};
  one[0].offset += Bytes{512};
  EXPECT_THROW(opened->run(FileWay::write, one), InvariantError);
}

INSTANTIATE_TEST_SUITE_P(both, Door,
                         testing::Values(World{"uring", "/var/tmp"}, World{"threads", "/var/tmp"},
                                         World{"uring", "/dev/shm"}, World{"threads", "/dev/shm"}),
                         [](const auto& world) {
                           return world.param.door + (world.param.above == "/dev/shm" ? "_in_memory" : "_on_disk");
                         });

// ---- files that no other user can touch -----------------------------------------------------------------------------

TEST(ScratchFile, has_no_name_and_leaves_nothing) {
  const OwnFolder folder;
  {
    ScratchFile file(folder.path);
    file.reserve(Bytes{std::int64_t{1} << 20});
    EXPECT_TRUE(fs::is_empty(folder.path));
    struct stat found{};
    ASSERT_EQ(fstat(file.to_use().descriptor, &found), 0);
    EXPECT_GE(found.st_blocks * 512, std::int64_t{1} << 20);
    EXPECT_EQ(found.st_mode & 0777, 0600);
  }
  EXPECT_TRUE(fs::is_empty(folder.path));
}

TEST(ScratchFile, makes_its_folder_for_this_user_alone) {
  const OwnFolder folder;
  const std::string below = folder.path + "/run1";
  const ScratchFile file(below);
  struct stat found{};
  ASSERT_EQ(stat(below.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0700);
}

TEST(ScratchFile, refuses_folders_that_others_can_write_to) {
  const OwnFolder folder;
  EXPECT_NE(error_of([] { ScratchFile("/tmp"); }).find("all users"), std::string::npos);
  fs::create_directory_symlink(folder.path, folder.path + "/link");
  EXPECT_NE(error_of([&] { ScratchFile(folder.path + "/link"); }).find("symbolic link"), std::string::npos);
  EXPECT_NE(error_of([&] { ScratchFile(folder.path + "/no/such"); }).find("No such file"), std::string::npos);
  fs::create_directory(folder.path + "/open");
  fs::permissions(folder.path + "/open", fs::perms::all);
  EXPECT_NE(error_of([&] { ScratchFile(folder.path + "/open"); }).find("all users"), std::string::npos);
  if (geteuid() == 0) {
    fs::create_directory(folder.path + "/foreign");
    ASSERT_EQ(chown((folder.path + "/foreign").c_str(), 12345, 12345), 0);
    EXPECT_NE(error_of([&] { ScratchFile(folder.path + "/foreign"); }).find("user 12345"), std::string::npos);
  }
}

TEST(ScratchFile, refuses_more_than_the_file_system_has_and_takes_nothing) {
  const OwnFolder folder;
  const Bytes before = free_space(folder.path);
  ScratchFile file(folder.path);
  const std::string said = error_of([&] { file.reserve(before + Bytes{std::int64_t{1} << 30}); });
  EXPECT_NE(said.find("free space there"), std::string::npos) << said;
  struct stat found{};
  ASSERT_EQ(fstat(file.to_use().descriptor, &found), 0);
  EXPECT_EQ(found.st_blocks, 0);
}

TEST(ScratchFile, names_the_limit_on_file_sizes) {
  const OwnFolder folder;
  const auto with_limit = [&] {
    std::signal(SIGXFSZ, SIG_IGN);  // as Python does
    const rlimit limit{1 << 20, 1 << 20};
    setrlimit(RLIMIT_FSIZE, &limit);
    ScratchFile file(folder.path);
    const std::string said = error_of([&] { file.reserve(Bytes{2 << 20}); });
    return said.find("ulimit -f") != std::string::npos && said.find("1.0 MiB") != std::string::npos ? 0 : 1;
  };
  const pid_t child = fork();  // a limit cannot be raised again
  if (child == 0) _exit(with_limit());
  int status = 1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace noria
