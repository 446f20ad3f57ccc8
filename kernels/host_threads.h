// Lets a host compiler build kernels/update.cu for tests. Each kernel becomes a function, and one thread loops over all
// elements.
//
// Order: the caller turns on the flushing of denormals (csrc/optim/flush_denormals.h) around kernels of rules that
// flush.
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
  KeepDenormals() : saved_(FloatControl::read()) { FloatControl::write(saved_ & ~FloatControl::kFlushes); }
  ~KeepDenormals() { FloatControl::write(saved_); }
  KeepDenormals(const KeepDenormals&) = delete;  // one restore for one save
  KeepDenormals& operator=(const KeepDenormals&) = delete;

 private:
  const std::uint64_t saved_;
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
