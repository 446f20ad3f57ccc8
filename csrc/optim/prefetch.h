// Asks memory for what a loop needs soon. Otherwise memory idles while a core computes on its first cache: when it
// scales a gradient, or looks for exceptions.
//
// A prefetch reads nothing, so it may go beyond the end of an array. docs/kernels.md tells where it saves time.
#pragma once

#include <cstddef>

#include "optim/update_kernels.h"

namespace noria {

/// Asks for `count` elements of an array from element `at` on.
template <class Element>
[[gnu::always_inline]] inline void prefetch(const Element* array, std::size_t at, std::size_t count) {
  constexpr std::size_t kLine = 64;
  if (array == nullptr) return;
  for (std::size_t i = at; i < at + count; i += kLine / sizeof(Element)) __builtin_prefetch(array + i);
}

[[gnu::always_inline]] inline void prefetch(const MomentArray& moment, std::size_t at, std::size_t count) {
  prefetch(moment.fp32, at, count);
  prefetch(moment.bf16, at, count);
  prefetch(moment.codes, at, count);
}

[[gnu::always_inline]] inline void prefetch(const UnitArrays& arrays, std::size_t at, std::size_t count) {
  prefetch(arrays.master, at, count);
  prefetch(arrays.working, at, count);
  prefetch(arrays.low, at, count);
  prefetch(arrays.m, at, count);
  prefetch(arrays.v, at, count);
}

}  // namespace noria
