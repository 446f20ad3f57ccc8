#include "optim/moment_codes.h"

#include <algorithm>

#include "optim/update_kernels.h"

namespace noria {
namespace {

#define NORIA_INDEPENDENT
#define NORIA_EACH
#include "optim/state_formats.inc"
#undef NORIA_EACH
#undef NORIA_INDEPENDENT

template <class Codes>
void encode(const float* values, u8* codes, float* scales, std::size_t count) {
  for (std::size_t at = 0; at < count; at += kStateBlock) {
    const auto to_nearest = [](std::size_t) { return 0.5f; };
    *scales++ = encode_block<Codes>(values + at, codes + at, std::min(kStateBlock, count - at), to_nearest);
  }
}

template <class Codes>
void decode(const u8* codes, const float* scales, float* values, std::size_t count) {
  for (std::size_t at = 0; at < count; at += kStateBlock) {
    decode_block<Codes>(codes + at, *scales++, values + at, std::min(kStateBlock, count - at));
  }
}

}  // namespace

void encode_moment(const float* values, std::uint8_t* codes, float* scales, std::size_t count, bool is_first) {
  (is_first ? encode<FirstCodes> : encode<SecondCodes>)(values, codes, scales, count);
}

void decode_moment(const std::uint8_t* codes, const float* scales, float* values, std::size_t count, bool is_first) {
  (is_first ? decode<FirstCodes> : decode<SecondCodes>)(codes, scales, values, count);
}

std::uint32_t random_bits_of(std::uint32_t number) { return random_bits(number, 0); }

}  // namespace noria
