// Describes one unit's update: which rule, on which arrays, with which hyperparameters. The driver here runs it on a
// range of elements with the widest instruction set.
//
// Units: elements; an offset counts in every array but scales alike.
// Ownership: none; the caller owns the arrays.
// Order: none. Ranges that do not overlap may be updated at the same time. The bits are the same however the arrays are
//   cut.
// Threads: any; nothing here keeps state.
//
// Note [Same bits everywhere]. A rule is plain C++ with every fused multiply-add written out (optim/update_rules.inc).
// It is compiled with -ffp-contract=off once per instruction set. So auto-vectorised code of any width gives the same
// bits. (Of a NaN only that it is one: which NaN an operation makes is the machine's own.)
//
// Note [Denormals]. Denormal moments and products are flushed by control register, inside `update_elements` and never
// outside of it. The reason: the moments of a parameter without gradient decay into denormals, which cost up to ten
// times the time on some processors. The price: if a gradient is below 3e-18, its square is lost from v. That shows
// only if eps is below 1e-15. (With eps = 0 such an element divides by zero, as a zero gradient does in torch.) Lion is
// not flushed, because its step is a sign: a moment that became zero would take no step, but torch takes a whole one.
//
// x86 flushes a result that is a denormal after rounding, ARM one that was a denormal before. So a product just below
// 2^-126, which rounds up to it, is 2^-126 on x86 and 0 on ARM. Sums of floats that small are exact, so they are the
// same. On machines other than x86, products are computed twice. The second time they are 2^64 times as large, and show
// how they round. Kernels for GPUs compute them twice, too, which is right however a GPU flushes.
//
// Note [State formats]. Moments are floats, bf16, or codes of 8 bits with one fp32 scale for each block of 256
// elements. The rule computes with floats, and p moves by moments that are not rounded yet. Rounding is stochastic and
// unbiased. With rounding to nearest, a second moment in bf16 could not decay at beta2 = 0.999: its step is less than
// half of the last bit. The random bits are a hash of seed, step and the number of the element
// (`UpdatePiece::first`). So the result does not depend on schedule, thread, cut or instruction set.
//
// Values that are not finite: bf16 keeps them, element by element, as fp32 does. In 8 bits a first moment above 2^125
// becomes NaN. A second moment above that stops its whole block. A NaN stays with its element.
// (optim/state_formats.inc.)
//
// Note [Factor]. Unscaling, clipping and the sign of maximize reach the rule as one factor on the gradient. The product
// is rounded to the gradient's dtype and keeps denormals. So the update has the bits of one after
// `p.grad.mul_(factor)`. Before that, and in the same way, the job does what a pipeline's schedule does to gradients:
// `p.grad.div_(divisor)`, which on CUDA is `p.grad.mul_(prefactor)`.
//
// Note [Late scales]. When an update is queued, only the device knows the number by which a clip multiplies the
// gradient. The number is written to host memory before the job's waits have passed, and the job reads it there. The
// first such scale is applied with `prefactor`, a second one with `factor`. If there are more, the caller multiplies
// the gradient itself.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "optim/undo_log.h"
#include "optim/update_kernels.h"

namespace noria {

std::string_view to_string(UpdateRule rule);
/// Returns the rule of this name. Throws UsageError that lists the known words.
UpdateRule parse_update_rule(std::string_view text);
/// Returns how many of `m`, `v` the rule keeps: 0, 1 or 2, in this order.
int num_moments(UpdateRule rule);
constexpr bool is_elementwise(UpdateRule rule) { return static_cast<int>(rule) < kNumElementwiseRules; }
constexpr bool can_be_drafted(UpdateRule rule) { return static_cast<int>(rule) < kNumDraftedRules; }

/// Holds hyperparameters with torch's names and meanings. A rule reads those that its torch.optim class has.
struct UpdateHyper {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0, momentum = 0.0, dampening = 0.0;
  bool nesterov = false, maximize = false;
  double factor = 1.0, divisor = 1.0, prefactor = 1.0;
  double beta2_decay = -0.8, least_rms = 1e-3, most_rms = 1.0;  // of adafactor: the latter two are eps[1] and d
  std::array<double, 3> iteration{};                            // of muon: ns_coefficients
  int num_iterations = 0;                                       // of muon: ns_steps
};

/// `step` counts from 1; for sgd_momentum from the step that makes its buffer. Throws UsageError if `step` is below 1.
/// `seed` is that of the rounding.
UpdateScalars update_scalars(UpdateRule rule, const UpdateHyper& hyper, std::int64_t step, std::uint64_t seed = 0);

bool have_same_bits(const UpdateScalars& a, const UpdateScalars& b);

/// Describes one parameter's shape, and points at the second moments that adafactor keeps of it. A matrix, in the last
/// two dimensions, has one for each row and one for each column. Other parameters have one for each element, in
/// `by_column`. Of muon: the shape of one matrix.
struct FactoredMoments {
  std::int64_t num_matrices = 1, num_rows = 1, num_columns = 0;
  float* by_row = nullptr;
  float* by_column = nullptr;
};

/// Describes a contiguous run of elements with the same hyperparameters (one parameter). Pieces of a job do not
/// overlap.
struct UpdatePiece {
  std::int64_t offset = 0;
  std::int64_t count = 0;
  UpdateScalars scalars{};
  // If moments have fewer bits: all elements have numbers, and each parameter begins at a multiple of kStateBlock. An
  // element keeps its number however parameters are grouped into units.
  std::uint64_t first = 0;       // the number of this piece's first element
  std::int64_t first_block = 0;  // the index of its first scale in the unit's scales
  // Its gradient lies apart from those of the other pieces; null: it does not. `offset` counts from here, too.
  const void* gradient = nullptr;
  const float* late_scales = nullptr;  // see Note [Late scales]
  int num_late_scales = 0;
  // Of a job with an undo log: the scalars that the draft used, and the index of the piece's first block in the log.
  UpdateScalars drafted{};
  std::int64_t first_undo_block = 0;
  FactoredMoments factored{};  // of adafactor and muon
};

inline constexpr int kMostLateScales = 2;

/// Describes a part of a piece, for one task. `offset` counts as `UpdatePiece::offset` does.
struct UpdateChunk {
  std::size_t piece;
  std::int64_t offset;
  std::int64_t count;
};
/// Sets `chunks` to the pieces in parts of equal size. A sum over a piece adds the sums of its parts, in this order.
void cut_into_chunks(const std::vector<UpdatePiece>& pieces, std::vector<UpdateChunk>& chunks);

/// Holds for each piece of the job, as submitted, the sum of the squares of its gradient before any factor. It is 0 if
/// the piece was not wanted. Read it once the job's ticket has passed.
using GradientSums = std::shared_ptr<std::vector<double>>;

/// Counts what became of drafts when late scales were known.
struct LookCounts {
  std::atomic<std::int64_t> unchanged = 0, changed = 0;
};

/// Says how far a draft is. Shared with the jobs that undo or redo it.
struct DraftProgress {
  std::atomic<bool> has_begun = false;          // to write
  std::atomic<std::uint32_t> num_left_out = 0;  // blocks; final once the draft's ticket has passed
};

enum class UpdateTask : std::uint8_t {
  update,
  draft,  // an update that can be undone: it writes `log`
  undo,   // of the draft that wrote `log`
  redo,   // makes a draft the update that `scalars` describe: undoes it and updates anew if they differ from `drafted`
  sum,    // of squares: reads the gradient alone; `arrays` tells its dtype
};

/// Describes a matrix in rows. An iteration replaces it by one whose rows are almost orthogonal, and of about length 1;
/// if columns are fewer, its columns. `scalars` say how often and with which numbers.
struct MatrixToOrthogonalize {
  void* values;
  bool is_bf16;  // else fp32
  std::int64_t num_rows, num_columns;
  const UpdateScalars& scalars;
};
using Orthogonalize = std::function<void(const MatrixToOrthogonalize& matrix)>;

/// Calls a function with each number below a count, in any order and on any threads. Returns when all are done.
using ForEach = std::function<void(std::size_t count, const std::function<void(std::size_t)>& each)>;
/// Calls it on the calling thread, in order.
void for_each_here(std::size_t count, const std::function<void(std::size_t)>& each);

/// Describes a job. `gradient`: floats for whole masters, bf16 for split; null if each piece has its own. Where a draft
/// is undone, the gradient has the bytes that the draft has read.
struct UpdateJob {
  UpdateTask task = UpdateTask::update;
  UpdateRule rule = UpdateRule::adamw;
  UnitArrays arrays;
  const void* gradient = nullptr;
  std::vector<UpdatePiece> pieces;
  UndoLog log;                              // of draft, undo and redo
  std::shared_ptr<DraftProgress> progress;  // likewise
  GradientSums sums;                        // null: not needed
  std::shared_ptr<LookCounts> looks;        // counts the jobs that look; may be null
  std::function<bool(std::size_t)> wants;   // asked for each piece when all waits have passed; null: all wanted
  Orthogonalize orthogonalize;              // of muon

  bool has_late_scales() const;
  bool has_log() const { return log.header != nullptr; }
  StateFormat state_format() const;  // fp32 if the rule keeps nothing
  std::int64_t gradient_item_bytes() const { return arrays.master != nullptr ? 4 : 2; }
  /// Returns the address of the piece's gradient from element `at` on.
  const std::byte* gradient_at(const UpdatePiece& piece, std::size_t at) const {
    const void* base = piece.gradient != nullptr ? piece.gradient : gradient;
    return static_cast<const std::byte*>(base) + at * static_cast<std::size_t>(gradient_item_bytes());
  }
  Bytes gradient_bytes() const;
  /// Read plus written: AdamW 28 per element on whole masters, 26 on split ones with fp32 moments; with a log 1 more.
  /// Adafactor reads a parameter twice and its gradient three times. What muon's products move is not counted.
  Bytes bytes() const;
};

/// Makes an update a draft that writes this log.
void make_draft(UpdateJob& update, const UndoLog& log);
/// Call it before the first `update_elements` of a draft.
void begin_draft(const UpdateJob& draft);
/// Returns the job that undoes a draft.
UpdateJob undo_of(UpdateJob draft);
/// Makes an update of the same pieces the job that redoes a draft.
void make_redo(UpdateJob& update, const UpdateJob& draft);

/// Multiplies late scales into the pieces' scalars. Returns true if any of them changes a gradient. Call it once the
/// job's waits have passed.
bool take_up_late_scales(UpdateJob& job);

/// Returns the arrays of a piece from element `offset` on, which counts as `UpdatePiece::offset` does.
UnitArrays arrays_at(const UpdateJob& job, const UpdatePiece& piece, std::int64_t offset);

/// Throws InvariantError for a malformed job: arrays that are missing or of another format, overlapping pieces.
void check(const UpdateJob& job);

/// Returns the instruction sets that this build has and this machine can run, widest last: "baseline", "avx2",
/// "avx512"; on ARM "neon", "sve2".
std::vector<std::string> instruction_sets();

/// Returns the loops of an instruction set; if it is empty, of the widest. Throws UsageError for one that
/// `instruction_sets` does not list.
const UpdateKernels& kernels_for(const std::string& instruction_set);

/// See UpdateKernels::Sum. `offset` and `count` are as for `update_elements`. The sum of a longer range is the sum of
/// these sums, in order.
double sum_of_squares(const UpdateJob& job, const UpdatePiece& piece, std::int64_t offset, std::int64_t count,
                      const std::string& instruction_set = "");

/// Does the job's task to `count` elements of a piece. `offset` counts as `UpdatePiece::offset` does; if moments are
/// codes, a block begins there, and if the job has a log, a block of the log. Its rule is elementwise; for the others
/// see optim/factored.h and optim/muon.h. `instruction_set` is as for `kernels_for`.
void update_elements(const UpdateJob& job, const UpdatePiece& piece, std::int64_t offset, std::int64_t count,
                     const std::string& instruction_set = "");

}  // namespace noria
