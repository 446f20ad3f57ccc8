// The parts of one update, each by itself on a block that stays in the first cache. benchmarks/update_parts.py compiles
// this for each instruction set, and runs it. It prints a name and nanoseconds per element on each line, the best of
// many turns; on the first line the nanoseconds of a cycle: a product of integers takes three. (Some processors do
// chains of additions while they rename registers.)
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "optim/prefetch.h"
#include "optim/update_kernels.h"

namespace noria {

#include "optim/update_kernels.inc"

namespace {

constexpr std::size_t kCount = kStateBlock;

double now() {
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class Part>
void show(const char* name, double per, Part part) {
  constexpr int kTurns = 300, kTimes = 100;
  double best = 1e30;
  for (int turn = 0; turn < kTurns; ++turn) {
    const double begin = now();
    for (int i = 0; i < kTimes; ++i) {
      part();
      asm volatile("" ::: "memory");  // nothing is left out because it was done before
    }
    best = std::min(best, now() - begin);
  }
  std::printf("%s\t%.4f\n", name, best / kTimes / per);
}

[[gnu::noinline]] void hash(u32* bits, u32 number) {
  for (std::size_t i = 0; i < kCount; ++i, number += kStride) bits[i] = random_bits(number);
}

// The arrays of a block, with values as in training.
struct Arrays {
  alignas(64) float master[kCount], fp32_m[kCount], fp32_v[kCount], gradient[kCount];
  alignas(64) u16 working[kCount], low[kCount], bf16_m[kCount], bf16_v[kCount], half_gradient[kCount];
  alignas(64) u8 codes_m[kCount], codes_v[kCount];
  float scales[2] = {1e-3f, 1e-6f};

  Arrays() {
    for (std::size_t i = 0; i < kCount; ++i) {
      const float share = static_cast<float>(std::rand() % 1000 + 1) * 1e-3f, sign = i % 3 == 0 ? -1.0f : 1.0f;
      master[i] = 0.02f * share * sign;
      gradient[i] = 1e-3f * share * sign;
      fp32_m[i] = 1e-4f * share * sign;
      fp32_v[i] = 1e-7f * share;
      working[i] = static_cast<u16>(as_bits(master[i]) >> 16);
      low[i] = static_cast<u16>(i * 77);
      half_gradient[i] = static_cast<u16>(as_bits(gradient[i]) >> 16);
      bf16_m[i] = static_cast<u16>(as_bits(fp32_m[i]) >> 16);
      bf16_v[i] = static_cast<u16>(as_bits(fp32_v[i]) >> 16);
      codes_m[i] = static_cast<u8>(i % 255 + (i % 255 >= 128));  // all but that of a NaN
      codes_v[i] = static_cast<u8>(i);
    }
  }

  UnitArrays unit(bool is_split, StateFormat state) {
    UnitArrays unit;
    if (is_split) unit.working = working, unit.low = low;
    else unit.master = master;
    if (state == StateFormat::fp32) unit.m.fp32 = fp32_m, unit.v.fp32 = fp32_v;
    if (state == StateFormat::bf16) unit.m.bf16 = bf16_m, unit.v.bf16 = bf16_v;
    if (state == StateFormat::eight_bit) {
      unit.m = {nullptr, nullptr, codes_m, &scales[0]};
      unit.v = {nullptr, nullptr, codes_v, &scales[1]};
    }
    return unit;
  }
};

template <class Master, class State>
void show_ways(const char* name, Arrays& arrays, StateFormat state, const UpdateScalars& scalars) {
  const UnitArrays unit = arrays.unit(Master::kIsOfHalves, state);
  const void* gradient = Master::kIsOfHalves ? static_cast<const void*>(arrays.half_gradient) : arrays.gradient;
  const auto* g = static_cast<const Master::Gradient*>(gradient);
  const Inverses inverses = AdamW::inverses(scalars);
  u8 bytes[kCount];
  u32 list[3 * kCount + 2];
  char title[80];
  const auto titled = [&](const char* what) {
    std::snprintf(title, sizeof title, "%s, %s", name, what);
    return title;
  };
  show(titled("update"), kCount, [&] { update<AdamW, Master, State>(unit, gradient, kCount, scalars, {7}); });
  show(titled("draft"), kCount,
       [&] { draft_part<AdamW, Master, State>(unit, g, kCount, scalars, inverses, {7}, bytes, list); });
}

void show_parts_of_8bit(Arrays& arrays, const UpdateScalars& scalars) {
  const UnitArrays unit = arrays.unit(true, StateFormat::eight_bit);
  static BlockMoments moments;
  show("8-bit split: widen codes", kCount, [&] {
    widen_pairs(arrays.codes_m, moments.codes_m);
    widen_pairs(arrays.codes_v, moments.codes_v);
  });
  show("8-bit split: look for NaNs", kCount, [&] {
    if (have_nans(arrays.codes_m, kCount)) std::abort();
  });
  show("8-bit split: decode, and update moments", kCount,
       [&] { begin_pairs<AdamW>(unit, arrays.half_gradient, scalars, moments); });
  Block m{}, v{};
  show("8-bit split: scales", kCount, [&] {
    m = block_for<FirstCodes>(moments.m, kCount, moments.largest_m);
    v = block_for<SecondCodes>(moments.v, kCount, moments.largest_v);
  });
  show("8-bit split: step, and encode", kCount, [&] { end_pairs<AdamW>(unit, scalars, moments, m, v, 7); });
  show("8-bit split: narrow codes", kCount, [&] {
    narrow_pairs(moments.new_codes, 0, arrays.codes_m);
    narrow_pairs(moments.new_codes, 16, arrays.codes_v);
  });
}

}  // namespace
}  // namespace noria

int main() {
  using namespace noria;
  unsigned long sum = 1;
  show("cycle", 300, [&] { asm volatile(".rept 100\n imul $5, %0, %0\n .endr" : "+r"(sum)); });
  static Arrays arrays;
  const UpdateScalars scalars{1.0f, 1.0f, 1.0f, -1e-5f, -1e-3f, 0.1f, 0.001f, 1.0f, 1e-8f, 0.0f, 1.0f, 0.0f, 0.0f, 1};
  static u32 bits[kCount];
  show("hash", kCount, [&] { hash(bits, 7); });
  show_ways<Whole, Fp32State>("fp32 moments, whole", arrays, StateFormat::fp32, scalars);
  show_ways<Split, Fp32State>("fp32 moments, split", arrays, StateFormat::fp32, scalars);
  show_ways<Whole, Bf16State>("bf16 moments, whole", arrays, StateFormat::bf16, scalars);
  show_ways<Split, Bf16State>("bf16 moments, split", arrays, StateFormat::bf16, scalars);
  show_ways<Whole, EightBitState>("8-bit moments, whole", arrays, StateFormat::eight_bit, scalars);
  show_ways<Split, EightBitState>("8-bit moments, split", arrays, StateFormat::eight_bit, scalars);
  show_parts_of_8bit(arrays, scalars);
}
