// What memory allows, without arithmetic: the loops that benchmarks/adamw.py measures beside the kernels. Compiled by
// it for the machine at hand (-O3 -march=native), and called by ctypes.
//
// `rmw_*` touch what AdamW touches, in the same order of addresses: every array of the state is read and written, the
// gradient is read. `triad` is STREAM's a = b + s * c; its stores read the lines they write, so it moves 16 bytes.
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

using u16 = std::uint16_t;
using u32 = std::uint32_t;

constexpr std::size_t kChunk = 64 * 1024;

// Threads take chunks in turn, so that they walk through memory together, as the pool does.
template <class Work>
void in_chunks(std::size_t count, int num_threads, Work work) {
  std::vector<std::thread> threads;
  const auto stride = static_cast<std::size_t>(num_threads) * kChunk;
  const auto run = [&](std::size_t first) {
    for (std::size_t begin = first * kChunk; begin < count; begin += stride) {
      work(begin, begin + kChunk < count ? begin + kChunk : count);
    }
  };
  for (int i = 1; i < num_threads; ++i) threads.emplace_back(run, static_cast<std::size_t>(i));
  run(0);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

extern "C" {

void rmw_fp32(u32* __restrict p, u32* __restrict m, u32* __restrict v, const u32* __restrict g, std::size_t count,
              int num_threads) {
  in_chunks(count, num_threads, [=](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const u32 x = g[i];
      p[i] ^= x, m[i] ^= x, v[i] ^= x;
    }
  });
}

void rmw_split(u16* __restrict high, u16* __restrict low, u32* __restrict m, u32* __restrict v, const u16* __restrict g,
               std::size_t count, int num_threads) {
  in_chunks(count, num_threads, [=](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const u16 x = g[i];
      high[i] ^= x, low[i] ^= x, m[i] ^= x, v[i] ^= x;
    }
  });
}

void triad(float* __restrict a, const float* __restrict b, const float* __restrict c, std::size_t count,
           int num_threads) {
  in_chunks(count, num_threads, [=](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) a[i] = b[i] + 3.0F * c[i];
  });
}

}  // extern "C"
