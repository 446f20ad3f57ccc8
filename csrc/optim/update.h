// One unit's update: which rule, on which arrays, with which hyperparameters; and the driver that carries it out on a
// range of elements with the widest instruction set.
//
// Units: elements; offsets count into every array alike. Ownership: none; arrays are the caller's. Order: none; ranges
// that do not overlap may be updated at once, with the same bits however the arrays are cut. Threads: any; nothing here
// keeps state.
//
// Note [Same bits everywhere]. A rule is plain C++ with every fused multiply-add written out (optim/update_rules.inc),
// compiled with -ffp-contract=off once per instruction set; auto-vectorised code of any width then gives the same bits.
// Denormal moments and products are flushed by control register inside `update_elements` and never outside of it: the
// moments of a parameter without gradient decay into denormals, which cost up to ten times the time on some processors.
// The price: squares of gradients below 3e-18 are lost from v, which shows only where eps is below 1e-15 (with eps = 0
// such an element divides by zero, as a zero gradient does in torch). Lion is not flushed: its step is a sign, and a
// moment that became zero would take no step where torch takes a whole one.
//
// Note [Drafts]. `to` equal to `from` means in place. Otherwise the update is out of place: `from` is only read, and
// the same loop writes blocks that stay in the first cache, from where streaming stores carry them to `to`. Memory
// traffic is that of an update in place, and so are the bits.
//
// Note [State formats]. Moments are floats, bf16, or codes of 8 bits with an fp32 scale for each block of 256 elements;
// the rule computes with floats, and p moves by moments that are not rounded yet. Rounding is stochastic and unbiased:
// to nearest, a second moment in bf16 could not decay at beta2 = 0.999, whose step is less than half of its last bit.
// The random bits are a hash of seed, step and the number of the element (`UpdatePiece::first`), so the result depends
// on no schedule, thread, cut or instruction set. What is not finite: bf16 keeps it, element by element, as fp32 does.
// In 8 bits an infinite first moment becomes NaN, and an overflowed second moment stops its whole block; a NaN stays
// with its element. (optim/state_formats.inc.)
//
// Note [Factor]. Unscaling, clipping and the sign of maximize reach the rule as one factor on the gradient. The product
// is rounded to the gradient's dtype, denormals and all, so that the update is that of `p.grad.mul_(factor)` to the
// bit. Before that, in the same way, comes what a pipeline's schedule does to gradients: `p.grad.div_(divisor)`, which
// on CUDA is `p.grad.mul_(prefactor)`.
//
// Note [Late scales]. What a clip multiplies a gradient by is known on the device alone when the update is queued. It
// is written to host memory before the job's waits have passed, and the job reads it there. One such scale is applied
// where `prefactor` is, a second one where `factor` is; who wants more, multiplies the gradient itself.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "optim/update_kernels.h"

namespace noria {

std::string_view to_string(UpdateRule rule);
/// The inverse; throws UsageError that lists the known words.
UpdateRule parse_update_rule(std::string_view text);
/// How many of `m`, `v` the rule keeps: 0, 1 or 2, in this order.
int num_moments(UpdateRule rule);

/// torch's names and meanings; a rule reads those that its torch.optim class has.
struct UpdateHyper {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0, momentum = 0.0, dampening = 0.0;
  bool nesterov = false, maximize = false;
  double factor = 1.0, divisor = 1.0, prefactor = 1.0;
};

/// `step` counts from 1, for sgd_momentum from the making of its buffer; UsageError below. `seed` is of the rounding.
UpdateScalars update_scalars(UpdateRule rule, const UpdateHyper& hyper, std::int64_t step, std::uint64_t seed = 0);

bool have_same_bits(const UpdateScalars& a, const UpdateScalars& b);

/// A contiguous run of elements that share hyperparameters (one parameter). Pieces of a job do not overlap.
struct UpdatePiece {
  std::int64_t offset = 0;
  std::int64_t count = 0;
  UpdateScalars scalars{};
  // Where moments have fewer bits. Parameters are numbered through, each from a multiple of kStateBlock on; however
  // they lie in units, an element has one number.
  std::uint64_t first = 0;             // the number of this piece's first element
  std::int64_t first_block = 0;        // of its scales in the unit's
  const float* late_scales = nullptr;  // see the Note
  int num_late_scales = 0;
};

inline constexpr int kMostLateScales = 2;

/// What a draft remembers of the gradient that it read (optim/digest.h), for whoever must know whether it is still
/// that.
using GradientNote = std::shared_ptr<std::atomic<std::uint64_t>>;

/// By piece of a job as it was submitted: the sum of the squares of its gradient, before any factor; 0 where no update
/// was wanted. Read once the job's ticket has passed.
using GradientSums = std::shared_ptr<std::vector<double>>;

/// What came of looking.
struct LookCounts {
  std::atomic<std::int64_t> unchanged = 0, changed = 0;
};

enum class UpdateTask : std::uint8_t {
  update,
  update_if_changed,  // nothing is done if no late scale changes the gradient, and it is still what was noted, if it
                      // was
  sum,                // arrays say no more than the gradient's dtype
};

/// `to` equal to `from`: in place, else a draft (see the Note). `gradient`: floats for whole masters, bf16 for split.
struct UpdateJob {
  UpdateTask task = UpdateTask::update;
  UpdateRule rule = UpdateRule::adamw;
  UnitArrays from, to;
  const void* gradient = nullptr;
  std::vector<UpdatePiece> pieces;
  GradientNote note;                       // null: nobody will ask
  GradientSums sums;                       // null: nobody will ask
  std::shared_ptr<LookCounts> looks;       // of the jobs that look; may be null
  std::function<bool(std::size_t)> wants;  // of a piece, asked when all waits have passed; null: all are wanted

  bool in_place() const;
  bool has_late_scales() const;
  StateFormat state_format() const;  // fp32 where the rule keeps nothing
  std::int64_t gradient_item_bytes() const { return from.master != nullptr ? 4 : 2; }
  Bytes gradient_bytes() const;
  Bytes bytes() const;  // read plus written: AdamW 28 per element on whole masters, 26 on split ones with fp32 moments
};

/// Reads late scales into the pieces' scalars; true if any of them changes a gradient. Once the job's waits have
/// passed.
bool take_up_late_scales(UpdateJob& job);

/// Throws InvariantError for a job that no plan makes: arrays that are missing or of another format, overlapping
/// pieces.
void check(const UpdateJob& job);

/// Instruction sets that this build has and this machine can run, widest last: "baseline", "avx2", "avx512".
std::vector<std::string> instruction_sets();

/// See UpdateKernels::Sum. `offset` and `count` as for `update_elements`; a sum over more is one of sums, in order.
double sum_of_squares(const UpdateJob& job, std::int64_t offset, std::int64_t count,
                      const std::string& instruction_set = "");

/// Updates `count` elements of a piece from `offset` on, which counts as the piece's does; where moments are codes it
/// begins a block. `instruction_set` empty: the widest. UsageError for one that is not listed above.
void update_elements(const UpdateJob& job, const UpdatePiece& piece, std::int64_t offset, std::int64_t count,
                     const std::string& instruction_set = "");

}  // namespace noria
