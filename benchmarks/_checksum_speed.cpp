// noria's checksum, and what it is measured beside: a plain read of the same bytes, and memcpy. benchmarks/files.py
// compiles this with csrc/base/checksum.cpp, and calls it by ctypes. Each function works through `count` parts of
// `bytes` each, which begin `stride` bytes after each other; stride 0: the same part again and again.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/checksum.h"

namespace {

using Line [[gnu::vector_size(64)]] = std::uint64_t;

void done(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }  // no turn is left out

}  // namespace

extern "C" {

std::uint64_t checksums(const std::byte* memory, std::byte*, std::size_t bytes, std::size_t count, std::size_t stride) {
  std::uint64_t found = 0;
  for (std::size_t i = 0; i < count; ++i) {
    found += noria::checksum(memory + i * stride, {static_cast<std::int64_t>(bytes)});
    done(memory);
  }
  return found;
}

std::uint64_t reads(const std::byte* memory, std::byte*, std::size_t bytes, std::size_t count, std::size_t stride) {
  Line found{}, other{};
  for (std::size_t i = 0; i < count; ++i) {
    const auto* lines = reinterpret_cast<const Line*>(memory + i * stride);
    for (std::size_t j = 0; j + 1 < bytes / sizeof(Line); j += 2) found ^= lines[j], other ^= lines[j + 1];
    done(memory);
  }
  return found[0] ^ other[0];
}

std::uint64_t copies(const std::byte* memory, std::byte* to, std::size_t bytes, std::size_t count, std::size_t stride) {
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(to + i * stride, memory + i * stride, bytes);
    done(to);
  }
  return count;
}

}  // extern "C"
