#include "bindings/orthogonalize.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

namespace noria {

void orthogonalize_by_torch(const MatrixToOrthogonalize& matrix) {
  const at::NoGradGuard no_grad;
  (void)at::get_num_threads();  // at its first call a thread takes over the number that the user has set
  const UpdateScalars& s = matrix.scalars;
  const bool is_tall = matrix.num_rows > matrix.num_columns;
  const auto dtype = matrix.is_bf16 ? at::kBFloat16 : at::kFloat;
  const at::Tensor given = at::from_blob(matrix.values, {matrix.num_rows, matrix.num_columns}, dtype);
  at::Tensor x = given.to(at::kBFloat16, /*non_blocking=*/false, /*copy=*/true);
  if (is_tall) x = x.t();
  x.div_(x.norm().clamp_min(s.eps));
  for (int i = 0; i < static_cast<int>(s.num_iterations); ++i) {
    at::Tensor gram = at::mm(x, x.t());
    const at::Tensor update = at::addmm(gram, gram, gram, s.iteration_b, s.iteration_c);
    gram.reset();  // its memory goes back before more is taken
    x = at::addmm(x, update, x, s.iteration_a, 1.0);
  }
  given.copy_(is_tall ? x.t() : x);
}

}  // namespace noria
