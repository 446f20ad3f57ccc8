// Lets a host compiler build kernels/update.cu for tests. Each kernel becomes a function, and one thread loops over all
// elements.
//
// Order: the caller turns on the flushing of denormals (csrc/optim/flush_denormals.h) around kernels of rules that
// flush. Processors other than x86 keep denormals.
#pragma once

#include <cstddef>

#include "optim/flush_denormals.h"

#define NORIA_EACH [[gnu::always_inline]]
#define NORIA_KERNEL(name) void name
#define NORIA_THREAD std::size_t{0}
#define NORIA_THREADS std::size_t{1}

namespace noria {

/// Keeps denormals during its lifetime.
class KeepDenormals {
 public:
#if defined(__x86_64__)
  KeepDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(saved_); }
#else
  KeepDenormals() = default;
#endif
  KeepDenormals(const KeepDenormals&) = delete;  // one restore for one save
  KeepDenormals& operator=(const KeepDenormals&) = delete;

#if defined(__x86_64__)
 private:
  const unsigned saved_;
#endif
};

// `volatile` stops the compiler from moving the operation outside of the changed mode.
inline float times(float value, float factor) {
  const KeepDenormals keep;
  volatile float a = value, b = factor;
  volatile float product = a * b;
  return product;
}
inline float over(float value, float divisor) {
  const KeepDenormals keep;
  volatile float a = value, b = divisor;
  volatile float quotient = a / b;
  return quotient;
}

}  // namespace noria
