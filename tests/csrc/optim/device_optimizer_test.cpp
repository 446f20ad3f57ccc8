// Updates on the device: the bits of the host's pool, from gradients that lie apart.
#include "optim/device_optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "base/errors.h"
#include "optim/host_optimizer.h"

namespace noria {
namespace {

constexpr std::size_t kCounts[] = {3, 70'001, 64 * 1024};  // parts of chunks, and a whole one

// A unit of three parameters, and a gradient for each, in memory of its own.
struct Unit {
  Unit() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (const std::size_t count : kCounts) {
      offsets.push_back(static_cast<std::int64_t>(p.size()));
      for (std::size_t i = 0; i < count; ++i) {
        p.push_back(normal(random));
        m.push_back(normal(random));
        v.push_back(std::abs(normal(random)));
        together.push_back(normal(random));
      }
      p.resize(p.size() + 13);
      m.resize(p.size());
      v.resize(p.size());
      together.resize(p.size());
    }
    for (std::size_t i = 0; i < offsets.size(); ++i) {
      const auto begin = together.begin() + offsets[i];
      apart.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(kCounts[i]));
    }
  }

  UpdateJob job(bool is_apart) {
    UpdateJob made;
    made.arrays = {p.data(), nullptr, nullptr, {.fp32 = m.data()}, {.fp32 = v.data()}};
    if (!is_apart) made.gradient = together.data();
    for (std::size_t i = 0; i < offsets.size(); ++i) {
      UpdatePiece& piece = made.pieces.emplace_back();
      piece.offset = offsets[i];
      piece.count = static_cast<std::int64_t>(kCounts[i]);
      piece.scalars = update_scalars(UpdateRule::adamw, {.factor = 0.3}, 5 + static_cast<std::int64_t>(i));
      if (is_apart) piece.gradient = apart[i].data() - offsets[i];
    }
    return made;
  }

  std::vector<std::int64_t> offsets;
  std::vector<float> p, m, v, together;
  std::vector<std::vector<float>> apart;
};

std::unique_ptr<DeviceOptimizer> host_device() { return make_device_optimizer(make_host_backend({})); }

TEST(DeviceOptimizer, has_the_bits_of_the_pool) {
  Unit on_device, on_pool;
  host_device()->update({on_device.job(/*is_apart=*/true)}, Stream());
  HostOptimizer pool({.num_threads = 2});
  pool.submit({OpId(0), Lane::update, Verb::update, UnitId(0)}, on_pool.job(/*is_apart=*/false), {})->wait_passed();
  EXPECT_EQ(on_device.p, on_pool.p);
  EXPECT_EQ(on_device.m, on_pool.m);
  EXPECT_EQ(on_device.v, on_pool.v);
  EXPECT_NE(on_device.p, Unit().p);
}

TEST(DeviceOptimizer, sums_as_the_pool_does) {
  Unit unit;
  UpdateJob asked = unit.job(/*is_apart=*/false);
  asked.task = UpdateTask::sum;
  asked.sums = std::make_shared<std::vector<double>>();
  HostOptimizer pool({.num_threads = 2});
  pool.submit({OpId(0), Lane::update, Verb::sum, UnitId(0)}, asked, {})->wait_passed();
  UpdateJob apart = unit.job(/*is_apart=*/true);
  apart.task = UpdateTask::sum;
  std::vector<UpdateChunk> chunks;
  cut_into_chunks(apart.pieces, chunks);
  std::vector<double> sums(2 * kSumSpan * chunks.size());
  host_device()->sum({apart, apart}, sums.data(), Stream());
  for (std::size_t job = 0; job < 2; ++job) {
    std::vector<double> found(apart.pieces.size());
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      found[chunks[i].piece] += sums[kSumSpan * (job * chunks.size() + i)];
    }
    EXPECT_EQ(found, *asked.sums);
    EXPECT_GT(found[1], 0.0);
  }
}

TEST(DeviceOptimizer, refuses_a_malformed_job_before_any_has_begun) {
  Unit unit, broken;
  UpdateJob lacks = broken.job(/*is_apart=*/false);
  lacks.gradient = nullptr;
  const std::vector<float> before = unit.p;
  EXPECT_THROW(host_device()->update({unit.job(/*is_apart=*/true), lacks}, Stream()), InvariantError);
  EXPECT_EQ(unit.p, before);
}

}  // namespace
}  // namespace noria
