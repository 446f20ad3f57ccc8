// Sets the processor to flush denormals (they become zero, as results and as arguments) while it lives. The destructor
// restores the thread's former setting.
//
// On architectures other than x86 and ARM it does nothing: denormals are computed. That is slower, and the one place
// where the bits of those machines may differ.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace noria {

/// Reads and writes the register that says what floats do; kFlushes are the bits for denormals.
struct FloatControl {
#if defined(__x86_64__)
  static constexpr std::uint64_t kFlushes = 0x8000 | 0x0040;  // MXCSR: FTZ, DAZ
  static std::uint64_t read() { return _mm_getcsr(); }
  static void write(std::uint64_t value) { _mm_setcsr(static_cast<unsigned>(value)); }
#elif defined(__aarch64__)
  static constexpr std::uint64_t kFlushes = 1u << 24;  // FPCR: FZ
  static std::uint64_t read() {
    std::uint64_t value;
    asm volatile("mrs %0, fpcr" : "=r"(value)::"memory");
    return value;
  }
  static void write(std::uint64_t value) { asm volatile("msr fpcr, %0" ::"r"(value) : "memory"); }
#else
  static constexpr std::uint64_t kFlushes = 0;
  static std::uint64_t read() { return 0; }
  static void write(std::uint64_t) {}
#endif
};

class FlushDenormals {
 public:
  explicit FlushDenormals(bool flush = true) : saved_(FloatControl::read()) {
    if (flush) FloatControl::write(saved_ | FloatControl::kFlushes);
  }
  ~FlushDenormals() { FloatControl::write(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;  // one restore for one save
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  const std::uint64_t saved_;
};

}  // namespace noria
