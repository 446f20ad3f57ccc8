// Sets FTZ and DAZ (denormals become zero) while it lives. The destructor restores the thread's former setting.
//
// On architectures other than x86 it does nothing: denormals are computed. That is slower, and the one place where the
// bits of those machines may differ.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace noria {

class FlushDenormals {
 public:
#if defined(__x86_64__)
  explicit FlushDenormals(bool flush = true) : saved_(_mm_getcsr()) {
    if (flush) _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero);
  }
  ~FlushDenormals() { _mm_setcsr(saved_); }
#else
  explicit FlushDenormals(bool = true) {}
#endif
  FlushDenormals(const FlushDenormals&) = delete;  // one restore for one save
  FlushDenormals& operator=(const FlushDenormals&) = delete;

#if defined(__x86_64__)
 private:
  static constexpr unsigned kFlushToZero = 0x8000;
  static constexpr unsigned kDenormalsAreZero = 0x0040;
  const unsigned saved_;
#endif
};

}  // namespace noria
