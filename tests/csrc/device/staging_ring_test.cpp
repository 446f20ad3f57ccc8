// The staging ring over a link that is as late as it may be.
#include "device/staging_ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"

namespace noria {
namespace {

// Does what is queued only when a thread waits for it.
class LateLink final : public StagingRing::Link {
 public:
  void copy(std::byte* to, const std::byte* from, Bytes bytes) override {
    if (fail_in > 0 && --fail_in == 0) throw MachineError("the link is down");
    ++num_copies;
    queue_.push_back([=] { std::memcpy(to, from, static_cast<std::size_t>(bytes.count)); });
  }
  void mark(std::size_t piece) override {
    marks_.resize(std::max(marks_.size(), piece + 1));
    marks_[piece] = queue_.size();
  }
  void await(std::size_t piece) override {
    while (done_ < marks_.at(piece)) queue_[done_++]();
  }
  void finish() {
    while (done_ < queue_.size()) queue_[done_++]();
  }
  int num_copies = 0;
  int fail_in = 0;

 private:
  std::vector<std::function<void()>> queue_;
  std::vector<std::size_t> marks_;
  std::size_t done_ = 0;
};

std::vector<std::byte> noise(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& each : bytes) each = static_cast<std::byte>(random());
  return bytes;
}

CopySpan span(std::vector<std::byte>& to, const std::vector<std::byte>& from) {
  return {to.data(), from.data(), Bytes{static_cast<std::int64_t>(from.size())}};
}

TEST(StagingRing, CarriesEveryByteForAnySizeHoweverLateTheLinkIs) {
  for (const int num_pieces : {1, 2, 4}) {
    std::vector<std::byte> memory(static_cast<std::size_t>(100 * num_pieces));
    StagingRing ring(memory.data(), Bytes{100}, num_pieces);
    LateLink link;
    for (const std::size_t size : {0, 1, 99, 100, 101, 400, 401, 1234}) {
      const std::vector<std::byte> home = noise(size, static_cast<unsigned>(size));
      std::vector<std::byte> device(size), back(size);
      ring.carry_down(span(device, home), link);
      link.finish();
      EXPECT_EQ(device, home);
      ring.carry_up(span(back, device), link);
      ring.land(link);
      EXPECT_EQ(back, home);
    }
  }
}

TEST(StagingRing, HomeIsReadBeforeTheWayDownReturnsAndWrittenOnlyByLanding) {
  std::vector<std::byte> memory(400);
  StagingRing ring(memory.data(), Bytes{100}, 4);
  LateLink link;
  std::vector<std::byte> home = noise(250, 1), device(250), back(250);
  const std::vector<std::byte> before = home;
  ring.carry_down(span(device, home), link);
  std::fill(home.begin(), home.end(), std::byte{0});  // the host updates the weights
  link.finish();
  EXPECT_EQ(device, before);
  ring.carry_up(span(back, device), link);
  EXPECT_EQ(back, std::vector<std::byte>(250));  // the ring has room: nothing had to land yet
  ring.land(link);
  EXPECT_EQ(back, before);
}

TEST(StagingRing, WhatWasGivenUpNeverLands) {
  std::vector<std::byte> memory(400);
  StagingRing ring(memory.data(), Bytes{100}, 4);
  LateLink link;
  const std::vector<std::byte> device = noise(300, 2);
  std::vector<std::byte> given_up(300), back(300);
  link.fail_in = 3;
  EXPECT_THROW(ring.carry_up(span(given_up, device), link), MachineError);
  ring.give_up();
  ring.carry_up(span(back, device), link);
  ring.land(link);
  EXPECT_EQ(back, device);
  EXPECT_EQ(given_up, std::vector<std::byte>(300));
}

TEST(StagingRing, PiecesAreFullButForTheLast) {
  std::vector<std::byte> memory(400);
  StagingRing ring(memory.data(), Bytes{100}, 4);
  LateLink link;
  const std::vector<std::byte> home = noise(1001, 3);
  std::vector<std::byte> device(1001);
  ring.carry_down(span(device, home), link);
  EXPECT_EQ(link.num_copies, 11);
  EXPECT_THROW(StagingRing(memory.data(), Bytes{0}, 4), InvariantError);
}

}  // namespace
}  // namespace noria
