// What memory allows, without arithmetic: the loops that benchmarks/adamw.py measures beside the kernels. Compiled by
// it for the machine at hand (-O3 -march=native), and called by ctypes.
//
// `move_lines` reads and writes the arrays of a way, in the same order of addresses, and changes none of their values.
// `triad` is STREAM's a = b + s * c; its stores read the lines they write, so it moves 16 bytes.
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t kChunk = 64 * 1024;

// What memory moves at once. Of an array with elements of n bytes, 64 elements are n lines.
using Line [[gnu::vector_size(64)]] = std::uint64_t;
constexpr std::size_t kElements = 64;

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

enum How : int { kRead, kWritten, kChanged };

// Is 0, which no compiler knows: a line that is changed keeps its value, but is written.
volatile std::uint64_t nothing = 0;

}  // namespace

extern "C" {

struct Stream {
  Line* lines;
  int bytes_of_element;
  How how;
};

// Streams that are read come first. `count`: a multiple of kElements.
void move_lines(const Stream* streams, int num_streams, std::size_t count, int num_threads) {
  in_chunks(count, num_threads, [=](std::size_t begin, std::size_t end) {
    const Line none = Line{} + nothing;
    for (std::size_t i = begin / kElements; i < end / kElements; ++i) {
      Line seen{};
      for (int number = 0; number < num_streams; ++number) {
        const Stream stream = streams[number];
        const auto size = static_cast<std::size_t>(stream.bytes_of_element);
        Line* lines = stream.lines + i * size;
        if (stream.how == kRead) {
          for (std::size_t j = 0; j < size; ++j) seen |= lines[j] & none;
        } else if (stream.how == kWritten) {
          for (std::size_t j = 0; j < size; ++j) lines[j] = seen;
        } else {
          for (std::size_t j = 0; j < size; ++j) lines[j] |= seen;
        }
      }
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
