// What the outputs of a call will look like, before it runs.
//
// The CPU's own kernel is run once on zeros (or ones, if it refuses zeros) for each new signature: operator, sizes,
// strides, types, scalars. Its answer is kept. So it is what the kernel will do later, to the stride, and a wrong call
// raises at once. Not by meta kernels: their strides and types are CUDA's.
//
// Threads: any.
#pragma once

#include <memory>
#include <vector>

#include "call.h"

namespace pretend_gpu {

struct Output {
  enum class Kind { undefined, fresh, same, view } kind = Kind::undefined;
  Place place{};                     // same, view
  std::int64_t offset_in_bytes = 0;  // view: from the argument's first element
  std::vector<std::int64_t> sizes, strides;
  c10::ScalarType dtype = c10::ScalarType::Float;
};

struct Resized {
  Place place;
  std::vector<std::int64_t> sizes;
};

struct Foreseen {
  bool is_known = false;  // else the operator must see the values
  struct Returned {
    bool is_list = false;
    std::vector<Output> outputs;
  };
  std::vector<Returned> returned;
  std::vector<Resized> resized;  // arguments that get the result: `out=`
  bool has_work = false;         // not only views
};

std::shared_ptr<const Foreseen> foresee(const c10::OperatorHandle& op, const Call& call);

}  // namespace pretend_gpu
