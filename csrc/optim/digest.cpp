#include "optim/digest.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>

namespace noria {
namespace {

constexpr std::size_t kWords = 1024;  // of 64 bits, in a block
constexpr std::size_t kBlock = kWords * sizeof(std::uint64_t);

using Keys = std::array<std::uint32_t, 2 * kWords + 2>;

struct Secret {
  Secret() {
    std::random_device random;
    for (std::uint32_t& key : keys) key = random();
    place = (static_cast<std::uint64_t>(random()) << 32) | random();
  }
  Keys keys{};
  std::uint64_t place = 0;
};

const Secret& secret() {
  static const Secret drawn;
  return drawn;
}

// The finalizer of MurmurHash3: every bit of the input affects every bit of the output.
std::uint64_t mix(std::uint64_t bits) {
  bits ^= bits >> 33;
  bits *= 0xff51afd7ed558ccdULL;
  bits ^= bits >> 33;
  bits *= 0xc4ceb9fe1a85ec53ULL;
  return bits ^ (bits >> 33);
}

std::uint64_t digest_block(const std::uint64_t* words, std::uint64_t place, const Secret& drawn) {
  const Keys& keys = drawn.keys;
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  for (std::size_t i = 0; i < kWords; ++i) {
    const auto low = static_cast<std::uint32_t>(words[i]);
    const auto high = static_cast<std::uint32_t>(words[i] >> 32);
    first += static_cast<std::uint64_t>(low + keys[2 * i]) * static_cast<std::uint32_t>(high + keys[2 * i + 1]);
    second += static_cast<std::uint64_t>(low + keys[2 * i + 2]) * static_cast<std::uint32_t>(high + keys[2 * i + 3]);
  }
  return mix(first ^ mix(second ^ mix(place + drawn.place)));
}

}  // namespace

std::uint64_t digest(const void* data, std::size_t num_bytes, std::uint64_t place) {
  const Secret& drawn = secret();
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::uint64_t sum = 0;
  std::array<std::uint64_t, kWords> block;
  for (std::size_t done = 0; done < num_bytes; done += kBlock) {
    const std::size_t size = std::min(kBlock, num_bytes - done);
    if (size < kBlock) block.fill(0);
    std::memcpy(block.data(), bytes + done, size);
    sum += digest_block(block.data(), place + done, drawn);
  }
  return sum;
}

}  // namespace noria
