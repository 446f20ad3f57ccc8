// FTZ and DAZ for as long as it lives; what the thread had before comes back, whatever happens.
//
// On other architectures than x86 denormals are computed: slower, and the one place where their bits may differ.
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
