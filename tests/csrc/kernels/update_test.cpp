// kernels/update.cu, compiled for the host: the bits of the host's kernels, for every rule and master, over special
// values and random ones. What a device computes is tested where there is one.
#define NORIA_FLUSHES 2
#include "kernels/update.cu"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "optim/update.h"

namespace noria {
namespace {

using Kernel = void (*)(UnitArrays, const void*, std::size_t, UpdateScalars);

struct Case {
  UpdateRule rule;
  bool is_split;
  Kernel kernel;
};

const Case kCases[] = {
    {UpdateRule::adamw, false, noria_update_adamw_whole},
    {UpdateRule::adamw, true, noria_update_adamw_split},
    {UpdateRule::adam, false, noria_update_adam_whole},
    {UpdateRule::adam, true, noria_update_adam_split},
    {UpdateRule::sgd, false, noria_update_sgd_whole},
    {UpdateRule::sgd, true, noria_update_sgd_split},
    {UpdateRule::sgd_momentum, false, noria_update_sgd_momentum_whole},
    {UpdateRule::sgd_momentum, true, noria_update_sgd_momentum_split},
    {UpdateRule::lion, false, noria_update_lion_whole},
    {UpdateRule::lion, true, noria_update_lion_split},
};

std::vector<float> special_values() {
  using Limits = std::numeric_limits<float>;
  std::vector<float> values = {0.0f,
                               1.0f,
                               0.1f,
                               Limits::infinity(),
                               Limits::quiet_NaN(),
                               1e20f,
                               Limits::max(),
                               Limits::min(),
                               1e-38f,
                               Limits::denorm_min(),
                               3e-5f,
                               1.0f + 0x1p-7f,
                               0x1p-149f * 77};
  const std::size_t num_positive = values.size();
  for (std::size_t i = 0; i < num_positive; ++i) values.push_back(-values[i]);
  return values;
}

// The samples are all combinations of special values as p, m, v and gradient, then the same number of random ones.
struct Arrays {
  explicit Arrays(bool is_split) : is_split(is_split) {
    const std::vector<float> special = special_values();
    for (const float p : special) {
      for (const float m : special) {
        for (const float v : special) {
          for (const float g : special) add(p, m, v, g);
        }
      }
    }
    std::mt19937 random(3);
    std::uniform_int_distribution<std::uint32_t> bits;
    const auto any = [&] {
      const std::uint32_t drawn = bits(random);
      float value = 0;
      std::memcpy(&value, &drawn, sizeof value);
      return value;
    };
    for (std::size_t i = 0, count = master.size(); i < count; ++i) add(any(), any(), any(), any());
  }

  void add(float p, float m_value, float v_value, float g) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &p, sizeof bits);
    master.push_back(p);
    working.push_back(static_cast<std::uint16_t>((bits + 0x8000u) >> 16));
    low.push_back(static_cast<std::uint16_t>(bits));
    m.push_back(m_value);
    v.push_back(v_value);
    std::memcpy(&bits, &g, sizeof bits);
    gradient.push_back(g);
    narrow_gradient.push_back(static_cast<std::uint16_t>(bits >> 16));
  }

  UpdateJob job(UpdateRule rule, const UpdateScalars& scalars) {
    UpdateJob made;
    made.rule = rule;
    if (is_split) {
      made.arrays.working = working.data();
      made.arrays.low = low.data();
    } else {
      made.arrays.master = master.data();
    }
    if (num_moments(rule) > 0) made.arrays.m.fp32 = m.data();
    if (num_moments(rule) > 1) made.arrays.v.fp32 = v.data();
    made.gradient = is_split ? static_cast<const void*>(narrow_gradient.data()) : gradient.data();
    UpdatePiece& piece = made.pieces.emplace_back();
    piece.count = static_cast<std::int64_t>(master.size());
    piece.scalars = scalars;
    return made;
  }

  float value(std::size_t i) const {
    if (!is_split) return master[i];
    const auto bits = (static_cast<std::uint32_t>(working[i]) << 16) +
                      static_cast<std::uint32_t>(static_cast<std::int32_t>(static_cast<std::int16_t>(low[i])));
    float joined = 0;
    std::memcpy(&joined, &bits, sizeof joined);
    return joined;
  }

  const bool is_split;
  std::vector<float> master, m, v, gradient;
  std::vector<std::uint16_t> working, low, narrow_gradient;
};

// A NaN counts as a NaN: which one an operation gives is the machine's own.
bool is_same(float a, float b) { return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof a) == 0; }

std::size_t num_differences(const Arrays& a, const Arrays& b) {
  std::size_t found = 0;
  for (std::size_t i = 0; i < a.master.size(); ++i) {
    found += !is_same(a.value(i), b.value(i)) || !is_same(a.m[i], b.m[i]) || !is_same(a.v[i], b.v[i]);
  }
  return found;
}

void expect_same_bits(const Case& each, const UpdateHyper& hyper, bool is_flushed) {
  const UpdateScalars scalars = update_scalars(each.rule, hyper, 7);
  Arrays by_kernel(each.is_split), by_host(each.is_split);
  const UpdateJob job = by_kernel.job(each.rule, scalars);
  {
    const FlushDenormals flush(is_flushed);
    each.kernel(job.arrays, job.gradient, by_kernel.master.size(), scalars);
  }
  const UpdateJob same = by_host.job(each.rule, scalars);
  update_elements(same, same.pieces.front(), 0, same.pieces.front().count);
  const std::string name = std::string(to_string(each.rule)) + (each.is_split ? ", split" : ", whole");
  EXPECT_EQ(num_differences(by_kernel, by_host), 0u) << name;
  EXPECT_GT(num_differences(by_kernel, Arrays(each.is_split)), by_host.master.size() / 4) << name;
}

TEST(DeviceKernels, have_the_bits_of_the_hosts) {
  for (const Case& each : kCases) {
    const bool is_flushed = each.rule != UpdateRule::lion;
    expect_same_bits(each, {.lr = 0.1, .weight_decay = 0.1, .momentum = 0.9, .nesterov = true}, is_flushed);
    expect_same_bits(each, {.lr = 1e-3, .momentum = 0.5, .dampening = 0.1, .factor = 0.37}, is_flushed);
    expect_same_bits(each, {.weight_decay = 0.01, .momentum = 0.9, .maximize = true, .divisor = 3, .prefactor = 1e-8},
                     is_flushed);
  }
}

TEST(DeviceKernels, store_one_nan) {
  for (const Case& each : kCases) {
    Arrays arrays(each.is_split);
    const std::uint32_t all_bits = 0x7fffffff, ours = 0x7fc00000;
    std::memcpy(&arrays.m[0], &all_bits, sizeof all_bits);
    std::memcpy(&arrays.v[0], &all_bits, sizeof all_bits);
    const UpdateScalars scalars = update_scalars(each.rule, {.momentum = 0.9}, 7);
    const UpdateJob job = arrays.job(each.rule, scalars);
    each.kernel(job.arrays, job.gradient, arrays.master.size(), scalars);
    const auto is_ours = [&](float value) { return !std::isnan(value) || std::memcmp(&value, &ours, 4) == 0; };
    for (std::size_t i = 0; i < arrays.master.size(); ++i) {
      EXPECT_TRUE(is_ours(arrays.value(i)));
      if (num_moments(each.rule) > 0) {
        EXPECT_TRUE(is_ours(arrays.m[i]));
      }
      if (num_moments(each.rule) > 1) {
        EXPECT_TRUE(is_ours(arrays.v[i]));
      }
    }
  }
}

TEST(DeviceKernels, that_do_not_flush_have_other_bits) {
  const Case& adamw = kCases[0];
  const UpdateScalars scalars = update_scalars(adamw.rule, {}, 7);
  Arrays flushed(false), kept(false);
  const UpdateJob one = flushed.job(adamw.rule, scalars), other = kept.job(adamw.rule, scalars);
  adamw.kernel(other.arrays, other.gradient, kept.master.size(), scalars);
  const FlushDenormals flush;
  adamw.kernel(one.arrays, one.gradient, flushed.master.size(), scalars);
  EXPECT_GT(num_differences(flushed, kept), 0u);
}

TEST(DeviceKernels, sum_as_the_host_does) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> gradient;
  for (int i = 0; i < 200'001; ++i) gradient.push_back(normal(random));
  UpdateJob job;
  job.task = UpdateTask::sum;
  job.arrays.master = gradient.data();  // tells the dtype
  job.gradient = gradient.data();
  job.pieces.emplace_back().count = static_cast<std::int64_t>(gradient.size());
  std::vector<UpdateChunk> chunks;
  cut_into_chunks(job.pieces, chunks);
  std::vector<double> sums(32 * chunks.size());
  noria_sum_whole(gradient.data(), gradient.size(), static_cast<std::size_t>(chunks.front().count), sums.data());
  noria_add_sums(sums.data(), chunks.size());
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    EXPECT_EQ(sums[32 * i], sum_of_squares(job, job.pieces.front(), chunks[i].offset, chunks[i].count));
  }
}

}  // namespace
}  // namespace noria
