#include "bindings/byte_sums.h"

#include <ATen/core/grad_mode.h>

namespace noria {
namespace {

constexpr std::int64_t kColumns = 4099;
constexpr std::int64_t kWord = 8;  // bytes

}  // namespace

ByteSums sums_of(const at::Tensor& bytes) {
  const at::NoGradGuard no_grad;
  const std::int64_t rows = bytes.numel() / (kColumns * kWord);
  const std::int64_t whole = rows * kColumns * kWord;
  return {bytes.narrow(0, 0, whole).view(at::kLong).view({rows, kColumns}).sum(0),
          bytes.narrow(0, whole, bytes.numel() - whole).clone()};
}

at::Tensor differ(const ByteSums& a, const ByteSums& b) {
  const at::NoGradGuard no_grad;
  return a.columns.ne(b.columns).any().logical_or(a.rest.ne(b.rest).any());
}

}  // namespace noria
