#include "optim/muon.h"

#include <memory>
#include <vector>

#include "base/errors.h"

namespace noria {
namespace {

/// Holds a matrix in the format of a unit's gradients. As a master it is what the momentum is written to.
class Matrix {
 public:
  Matrix(bool is_split, std::size_t count)
      : is_split_(is_split),
        count_(count),
        whole_(is_split ? nullptr : std::make_unique_for_overwrite<float[]>(count)),
        halves_(is_split ? std::make_unique_for_overwrite<std::uint16_t[]>(2 * count) : nullptr) {}

  UnitArrays as_master() {
    UnitArrays arrays;
    if (is_split_) arrays.working = halves_.get(), arrays.low = halves_.get() + count_;
    else arrays.master = whole_.get();
    return arrays;
  }
  void* values() { return is_split_ ? static_cast<void*>(halves_.get()) : whole_.get(); }

 private:
  bool is_split_;
  std::size_t count_;
  std::unique_ptr<float[]> whole_;
  std::unique_ptr<std::uint16_t[]> halves_;  // the working copy, then the low bits, which are not used
};

/// Returns a job of one piece, which begins its arrays.
UpdateJob part_of_update(UpdateRule rule, const UpdatePiece& piece, const UnitArrays& arrays, const void* gradient) {
  UpdateJob job;
  job.rule = rule;
  job.arrays = arrays;
  job.pieces = {piece};
  job.pieces[0].offset = job.pieces[0].first_block = 0;
  job.pieces[0].gradient = gradient;
  return job;
}

}  // namespace

void run_muon(const UpdateJob& job, const ForEach& for_each, const std::function<void()>& part_done,
              const std::string& instruction_set) {
  NORIA_INVARIANT(job.rule == UpdateRule::muon && job.task == UpdateTask::update, "only updates of muon are this one");
  std::vector<UpdateChunk> chunks;
  const auto run = [&](const UpdateJob& part, const std::function<void()>& done) {
    cut_into_chunks(part.pieces, chunks);
    for_each(chunks.size(), [&](std::size_t i) {
      update_elements(part, part.pieces[0], chunks[i].offset, chunks[i].count, instruction_set);
      done();
    });
  };
  for (const UpdatePiece& piece : job.pieces) {
    if (piece.count == 0) continue;
    const UnitArrays own = arrays_at(job, piece, piece.offset);
    Matrix matrix(own.working != nullptr, static_cast<std::size_t>(piece.count));
    UnitArrays towards = matrix.as_master();
    towards.m = own.m;
    const void* gradient = job.gradient_at(piece, static_cast<std::size_t>(piece.offset));
    run(part_of_update(UpdateRule::muon_momentum, piece, towards, gradient), [] {});

    const FactoredMoments& shape = piece.factored;
    job.orthogonalize({matrix.values(), own.working != nullptr, shape.num_rows, shape.num_columns, piece.scalars});

    UnitArrays parameter = own;
    parameter.m = {};
    UpdateJob step = part_of_update(UpdateRule::muon_step, piece, parameter, matrix.values());
    UpdateScalars& scalars = step.pieces[0].scalars;
    scalars.divisor = scalars.prefactor = scalars.factor = 1.0f;  // they are the gradient's
    run(step, part_done);
  }
}

}  // namespace noria
