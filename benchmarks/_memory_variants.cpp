// AdamW on split masters, block by block, with one way to use memory changed at a time. benchmarks/memory_variants.py
// compiles this for the machine's instruction set, and runs it with a number of elements, of threads and of rounds. All
// variants take turns, and each run begins with the same values. A line has moments and way, variant, and seconds. If
// two variants do not make the same bits, the program fails.
#include <immintrin.h>
#include <sys/mman.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "optim/flush_denormals.h"
#include "optim/prefetch.h"
#include "optim/update_kernels.h"

namespace noria {

#include "optim/update_kernels.inc"

namespace {

constexpr std::size_t kChunk = 64 * 1024, kBlocks = kChunk / kStateBlock;  // as optim/update.cpp
constexpr std::size_t kPiece = 1024 * 1024;
constexpr std::size_t kHugePage = 2 * 1024 * 1024, kLine = 64;
constexpr std::size_t kSlots = kStateBlock / 4;  // of a block, for exceptions

enum Stream { kWorking, kLow, kGradient, kM, kV, kScaleM, kScaleV, kLog, kBegin, kSlot, kNumStreams };
using Sizes = std::array<std::size_t, kNumStreams>;  // bytes of a block
using Pointers = std::array<std::byte*, kNumStreams>;

// usual: huge pages, and one array for each stream, which begins with a page. interleaved: pieces of kPiece elements of
// all streams in turn, 2 MiB of working copies, for example.
enum Layout { usual, small_pages, staggered, interleaved, kNumLayouts };

struct Variant {
  const char* name;
  Layout layout = usual;
  std::size_t ahead = 0;  // blocks that are prefetched
  bool is_streamed = false;
  std::size_t scaled = 1;  // blocks of the gradient that are clipped at once
};
constexpr std::size_t kMostScaled = 16;
constexpr std::array<Variant, 9> kUsualVariants{{{"base"},
                                                 {"prefetch 1 block ahead", usual, 1},
                                                 {"prefetch 2 blocks ahead", usual, 2},
                                                 {"prefetch 4 blocks ahead", usual, 4},
                                                 {"prefetch 8 blocks ahead", usual, 8},
                                                 {"pages of 4 KiB", small_pages},
                                                 {"staggered starts", staggered},
                                                 {"interleaved arrays", interleaved},
                                                 {"streaming stores", usual, 0, true}}};
constexpr std::array<Variant, 5> kClippedVariants{{{"base"},
                                                   {"2 blocks are clipped at once", usual, 0, false, 2},
                                                   {"4 blocks are clipped at once", usual, 0, false, 4},
                                                   {"8 blocks are clipped at once", usual, 0, false, 8},
                                                   {"16 blocks are clipped at once", usual, 0, false, kMostScaled}}};

enum class Kind { update, draft, clipped };

template <class To>
To* as(std::byte* pointer) {
  return reinterpret_cast<To*>(pointer);
}

constexpr std::size_t rounded_up(std::size_t size, std::size_t to) { return (size + to - 1) / to * to; }

// The arrays in one layout.
class Memory {
 public:
  Memory(std::size_t count, const Sizes& sizes, Layout layout)
      : sizes_(sizes),
        piece_(layout == interleaved ? kPiece : count) {
    for (std::size_t i = 0; i < kNumStreams; ++i) {
      begins_[i] = bytes_of_piece_ + (layout == staggered ? i * 7 * kLine : 0);  // all within 4 KiB
      const std::size_t end = begins_[i] + piece_ / kStateBlock * sizes[i];
      bytes_of_piece_ = rounded_up(end, layout == interleaved ? kLine : kHugePage);
    }
    const std::size_t num_bytes = rounded_up(count / piece_ * bytes_of_piece_, kHugePage);
    bytes_.reset(static_cast<std::byte*>(std::aligned_alloc(kHugePage, num_bytes)));
    if (!bytes_) std::abort();
    madvise(bytes_.get(), num_bytes, layout == small_pages ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
  }

  // Where the streams have an element that begins a chunk. The rest of the chunk follows.
  Pointers at(std::size_t element) const {
    Pointers found;
    for (std::size_t i = 0; i < kNumStreams; ++i) {
      const std::size_t block = element % piece_ / kStateBlock;
      found[i] = bytes_.get() + element / piece_ * bytes_of_piece_ + begins_[i] + block * sizes_[i];
    }
    return found;
  }

 private:
  const Sizes sizes_;
  const std::size_t piece_;
  Sizes begins_{};
  std::size_t bytes_of_piece_ = 0;
  std::unique_ptr<std::byte, decltype(&std::free)> bytes_{nullptr, &std::free};
};

// With stores that bypass the caches. Both are aligned.
void stream_copy(std::byte* to, const std::byte* from, std::size_t num_bytes) {
  for (std::size_t i = 0; i < num_bytes; i += sizeof(__m128i)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_load_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
}

// Threads take chunks in turn, so that they walk through memory together, as the pool does.
template <class Work>
void in_chunks(std::size_t count, std::size_t num_threads, Work work) {
  const auto run = [&](std::size_t first) {
    const FlushDenormals flush;
    for (std::size_t chunk = first; chunk < count / kChunk; chunk += num_threads) work(chunk);
    _mm_sfence();
  };
  std::vector<std::thread> threads;
  for (std::size_t i = 1; i < num_threads; ++i) threads.emplace_back(run, i);
  run(0);
  for (std::thread& thread : threads) thread.join();
}

long huge_page_kib() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string word;
  long kib = 0;
  while (file >> word) {
    if (word == "AnonHugePages:") file >> kib;
  }
  return kib;
}

template <class State, Kind kKind>
class Bench {
 public:
  // Returns false if two variants made different bits, or a log had no room.
  bool run(const char* name, std::size_t count, std::size_t num_threads, int rounds) {
    headers_.resize(count / kChunk);
    std::vector<std::unique_ptr<Memory>> memories;
    for (int i = 0; i < kNumLayouts; ++i) {
      memories.push_back(std::make_unique<Memory>(count, kSizes, static_cast<Layout>(i)));
    }
    u64 expected = 0;
    for (int round = 0; round <= rounds; ++round) {
      for (const Variant& variant : kVariants) {
        const Memory& memory = *memories[variant.layout];
        in_chunks(count, num_threads, [&](std::size_t chunk) { fill(memory, chunk); });
        const auto begin = std::chrono::steady_clock::now();
        in_chunks(count, num_threads, [&](std::size_t chunk) { run_chunk(memory, chunk, variant); });
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
        if (round > 0) std::printf("%s\t%s\t%.9f\n", name, variant.name, taken.count());
        if (round < rounds) continue;
        const u64 found = checksum(memory);
        if (&variant == kVariants.data()) expected = found;
        if (found != expected || found == 0) {
          std::fprintf(stderr, "%s, %s: other bits, or no room in a log\n", name, variant.name);
          return false;
        }
      }
    }
    std::printf("%s\thuge pages, KiB\t%ld\n", name, huge_page_kib());
    return true;
  }

 private:
  static constexpr bool kIsDraft = kKind == Kind::draft;
  static constexpr auto kVariants = [] {
    if constexpr (kKind == Kind::clipped) return kClippedVariants;
    else return kUsualVariants;
  }();
  static constexpr Sizes kSizes = [] {
    Sizes sizes{};
    sizes[kWorking] = sizes[kLow] = sizes[kGradient] = 2 * kStateBlock;
    sizes[kM] = sizes[kV] = (State::kIsCoded ? 1 : State::kIsOfHalves ? 2 : 4) * kStateBlock;
    if (State::kIsCoded) sizes[kScaleM] = sizes[kScaleV] = sizeof(float);
    if (kIsDraft) sizes[kLog] = kStateBlock, sizes[kBegin] = sizeof(u32), sizes[kSlot] = kSlots * sizeof(u32);
    return sizes;
  }();
  static constexpr auto kStreamed = [] {
    if constexpr (kIsDraft) return std::array{kLog};
    else return std::array{kWorking, kLow, kM, kV};
  }();
  // A learning rate of 1e-3 and a decay of 1e-2, in step 30.
  static constexpr UpdateScalars kScalars{1.0f, 1.0f,  1.0f, -1e-5f, -1.04e-3f, 0.1f, 0.001f,
                                          5.8f, 1e-8f, 0.0f, 1.0f,   0.0f,      0.0f, 1};

  static UnitArrays unit(const Pointers& at) {
    UnitArrays unit;
    unit.working = as<u16>(at[kWorking]), unit.low = as<u16>(at[kLow]);
    if constexpr (State::kIsCoded) {
      unit.m = {nullptr, nullptr, as<u8>(at[kM]), as<float>(at[kScaleM])};
      unit.v = {nullptr, nullptr, as<u8>(at[kV]), as<float>(at[kScaleV])};
    } else if constexpr (State::kIsOfHalves) {
      unit.m.bf16 = as<u16>(at[kM]), unit.v.bf16 = as<u16>(at[kV]);
    } else {
      unit.m.fp32 = as<float>(at[kM]), unit.v.fp32 = as<float>(at[kV]);
    }
    return unit;
  }

  static void advance(Pointers& at) {
    for (std::size_t i = 0; i < kNumStreams; ++i) at[i] += kSizes[i];
  }

  // Values as in training.
  static void fill(const Memory& memory, std::size_t chunk) {
    Pointers at = memory.at(chunk * kChunk);
    auto number = static_cast<u32>(chunk * kChunk);
    const auto next = [&](float width) {  // around 0
      return width * (static_cast<float>(random_bits(++number * kStride) >> 8) * 0x1p-24f - 0.5f);
    };
    const Block block_m = block_of<FirstCodes>(5e-4f), block_v = block_of<SecondCodes>(1.2e-6f);
    for (std::size_t block = 0; block < kBlocks; ++block, advance(at)) {
      const UnitArrays arrays = unit(at);
      if constexpr (State::kIsCoded) *arrays.m.scales = block_m.scale, *arrays.v.scales = block_v.scale;
      for (std::size_t i = 0; i < kStateBlock; ++i) {
        Split::store(arrays, i, next(0.04f));
        as<u16>(at[kGradient])[i] = static_cast<u16>(as_bits(next(3.5e-3f)) >> 16);
        const float m = next(8.7e-4f), v = 1e-6f + next(3.5e-7f);
        if constexpr (State::kIsCoded) {
          arrays.m.codes[i] = static_cast<u8>(FirstCodes::encode(m, block_m, FirstCodes::Magnitude::kToNearest));
          arrays.v.codes[i] = static_cast<u8>(SecondCodes::encode(v, block_v, SecondCodes::Magnitude::kToNearest));
        } else {
          State::put(arrays.m, i, State::nearest(m));
          State::put(arrays.v, i, State::nearest(v));
        }
      }
    }
  }

  void run_chunk(const Memory& memory, std::size_t chunk, const Variant& variant) {
    Pointers at = memory.at(chunk * kChunk);
    [[maybe_unused]] u32* const slots = as<u32>(at[kSlot]);
    headers_[chunk] = {};
    alignas(kLine) std::byte buffers[kNumStreams][sizeof(float) * kStateBlock];
    alignas(kLine) u16 clipped[kMostScaled * kStateBlock];
    for (std::size_t block = 0; block < kBlocks; ++block, advance(at)) {
      const void* gradient = at[kGradient];
      if constexpr (kKind == Kind::clipped) {
        const std::size_t place = block % variant.scaled;
        if (place == 0) {  // as optim/update.cpp
          noria::prefetch(unit(at), 0, kStateBlock / 2);
          noria::prefetch(as<u16>(at[kGradient]), variant.scaled * kStateBlock, kStateBlock);
          scale<Split>(gradient, clipped, variant.scaled * kStateBlock, 0.37f);
        }
        gradient = clipped + place * kStateBlock;
      }
      if (variant.ahead > 0 && block + variant.ahead < kBlocks) prefetch(at, variant.ahead);
      const Rounding rounding = moved({7}, chunk * kChunk + block * kStateBlock);
      Pointers out = at;
      for (const Stream stream : kStreamed) {
        if (!variant.is_streamed) break;
        out[stream] = buffers[stream];
        if (!kIsDraft) std::memcpy(out[stream], at[stream], kSizes[stream]);
      }
      if constexpr (kIsDraft) {
        const UndoBlock log{as<u8>(out[kLog]), as<u32>(at[kBegin]), &headers_[chunk], slots, kSlots * kBlocks};
        draft<AdamW, Split, State>(unit(out), gradient, kStateBlock, kScalars, rounding, log);
      } else {
        update<AdamW, Split, State>(unit(out), gradient, kStateBlock, kScalars, rounding);
      }
      for (const Stream stream : kStreamed) {
        if (variant.is_streamed) stream_copy(at[stream], out[stream], kSizes[stream]);
      }
    }
  }

  static void prefetch(const Pointers& at, std::size_t blocks) {
    for (std::size_t i = 0; i < kSlot; ++i) {  // which slots will be written is not known
      noria::prefetch(at[i], blocks * kSizes[i], kSizes[i]);
    }
  }

  // Of all that a run writes. 0: a log had no room.
  u64 checksum(const Memory& memory) const {
    u64 sum = 0xcbf29ce484222325u;
    for (std::size_t chunk = 0; chunk < headers_.size(); ++chunk) {
      if (headers_[chunk].num_left > 0) return 0;
      const Pointers at = memory.at(chunk * kChunk);
      for (std::size_t i = 0; i < kNumStreams; ++i) {
        const std::size_t count = i == kSlot ? headers_[chunk].num_used : kBlocks * kSizes[i] / sizeof(u32);
        for (std::size_t j = 0; j < count; ++j) sum = (sum ^ as<u32>(at[i])[j]) * 0x100000001b3u;
      }
    }
    return sum;
  }

  std::vector<UndoHeader> headers_;  // a log for each chunk, so that no bit depends on the order of threads
};

// Returns false if something is wrong.
template <class State>
bool run_all(const std::string& name, char** words) {
  const std::size_t count = std::stoull(words[1]), num_threads = std::stoull(words[2]);
  const int rounds = std::stoi(words[3]);
  return Bench<State, Kind::update>().run((name + ", update").c_str(), count, num_threads, rounds) &&
         Bench<State, Kind::draft>().run((name + ", draft").c_str(), count, num_threads, rounds) &&
         Bench<State, Kind::clipped>().run((name + ", clipped update").c_str(), count, num_threads, rounds);
}

}  // namespace
}  // namespace noria

int main(int, char** words) {
  using namespace noria;
  const bool is_right = run_all<Fp32State>("fp32 moments", words) && run_all<Bf16State>("bf16 moments", words) &&
                        run_all<EightBitState>("8-bit moments", words);
  return is_right ? 0 : 1;
}
