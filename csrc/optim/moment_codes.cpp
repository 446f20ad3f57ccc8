#include "optim/moment_codes.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace noria {
namespace {

#define NORIA_INDEPENDENT
#define NORIA_EACH
#include "optim/state_formats.inc"
#undef NORIA_EACH
#undef NORIA_INDEPENDENT

// Returns the largest magnitude of these values, as bits.
u32 largest_of(const float* values, std::size_t count) {
  u32 largest = 0;
  for (std::size_t i = 0; i < count; ++i) largest = larger(largest, magnitude_bits(values[i]));
  return largest;
}

template <class Codes>
u8 code_of(float value, const Block& block) {
  constexpr bool kIsFirst = std::is_same_v<Codes, FirstCodes>;
  if (kIsFirst && has_no_code(value)) return FirstCodes::kNan;
  // `SecondCodes::encode` tells a zero by its bits. Rules with second moments flush denormals.
  if (!kIsFirst && std::abs(value) < kSmallestNormal) value = 0.0f;
  return static_cast<u8>(Codes::encode(value, block, Codes::Magnitude::kToNearest));
}

template <class Codes>
void encode(const float* values, u8* codes, float* scales, std::size_t count) {
  for (std::size_t at = 0; at < count; at += kStateBlock) {
    const std::size_t size = std::min(kStateBlock, count - at);
    const Block block = block_for<Codes>(values + at, size, largest_of(values + at, size));
    for (std::size_t i = at; i < at + size; ++i) codes[i] = code_of<Codes>(values[i], block);
    *scales++ = block.scale;
  }
}

template <class Codes>
void decode(const u8* codes, const float* scales, float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) values[i] = Codes::decode(Codes::widened(codes[i]), scales[i / kStateBlock]);
}

}  // namespace

void encode_moment(const float* values, std::uint8_t* codes, float* scales, std::size_t count, bool is_first) {
  (is_first ? encode<FirstCodes> : encode<SecondCodes>)(values, codes, scales, count);
}

void decode_moment(const std::uint8_t* codes, const float* scales, float* values, std::size_t count, bool is_first) {
  (is_first ? decode<FirstCodes> : decode<SecondCodes>)(codes, scales, values, count);
}

Rounding first_random(std::uint32_t key, std::uint64_t element) {
  return moved({key ^ random_bits(static_cast<u32>(element >> 32))}, element);
}

}  // namespace noria
