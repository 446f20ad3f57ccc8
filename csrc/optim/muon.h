// Runs jobs of muon: each matrix moves by its momentum, made orthogonal. (Jordan et al., "Muon: An optimizer for hidden
// layers in neural networks", 2024; as in torch.optim.Muon)
//
// Units: elements.
// Ownership: none; the caller owns the arrays. A job takes memory for its largest matrix, and gives it back: 4 bytes an
//   element, beside what `orthogonalize` takes.
// Order: one matrix after the other. The two elementwise ends of an update have the same bits on any threads. The
//   products between them have those of `orthogonalize`.
// Threads: any.
#pragma once

#include <functional>
#include <string>

#include "optim/update.h"

namespace noria {

/// Runs the job. `part_done` is called after each part that is written.
void run_muon(const UpdateJob& job, const ForEach& for_each, const std::function<void()>& part_done,
              const std::string& instruction_set = "");

}  // namespace noria
