// Declares what the translation units for each instruction set share with their driver: arrays, scalars, and a table of
// loops.
//
// It is separate from optim/update.h and does not use the standard library. The reason: these files are compiled for
// instruction sets that the running machine may lack. If an inline function leaked out of them, the linker could keep
// that copy for the whole program.
#pragma once

#include <cstddef>
#include <cstdint>

namespace noria {

/// How many sums are added up for a sum of squares.
inline constexpr std::size_t kSumSpan = 32;
/// The most elements of a row that one call of a factored loop takes.
inline constexpr std::size_t kStretch = 2048;

/// Names the formula that turns a gradient into a new value (optim/update_rules.inc). SGD without momentum keeps no
/// state, so it is a rule of its own. The last two are not elementwise (optim/factored_kernels.inc, optim/muon.h), and
/// the two before them are parts of muon.
enum class UpdateRule : std::uint8_t {
  adamw,
  adam,
  sgd,
  sgd_momentum,
  lion,
  muon_step,
  muon_momentum,
  adafactor,
  muon,
};
inline constexpr int kNumRules = 9;
inline constexpr int kNumElementwiseRules = 7;
inline constexpr int kNumDraftedRules = 5;  // the first ones: their updates can be drafted and undone

/// How the fp32 master is kept: whole (it is the working copy), or split; see optim/split_master.h.
enum class MasterFormat : std::uint8_t { whole, split };
inline constexpr int kNumMasterFormats = 2;

/// How moments are kept; see optim/update.h, Note [State formats].
enum class StateFormat : std::uint8_t { fp32, bf16, eight_bit };
inline constexpr int kNumStateFormats = 3;
/// How many elements of a parameter share a scale if moments are codes, counted from the parameter's beginning.
inline constexpr std::size_t kStateBlock = 256;

/// Holds the hyperparameters in the form that the formulas use, each rounded once from double. `update_scalars` makes
/// them. A rule reads those that its formula names.
struct UpdateScalars {
  // The rule sees the gradient divided by the first, times the second, times the third. Each result is rounded to the
  // gradient's dtype.
  float divisor;
  float prefactor;
  float factor;
  float decay;               // adamw, lion, adafactor, muon: -lr * weight_decay; adam, sgd: weight_decay
  float negative_step;       // adamw, adam: -lr / (1 - beta1^step); adafactor: -min(lr, 1 / sqrt(step)); else -lr
  float one_minus_beta1;     // muon: 1 - momentum
  float one_minus_beta2;     // adafactor: step^beta2_decay
  float inverse_bias2_root;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float momentum;
  float gradient_share;  // 1 - dampening
  // 0 or 1, kept as floats: compilers do not vectorise a loop over halves of a master if its conditions have another
  // size.
  float nesterov;
  float is_first;          // of sgd_momentum: overwrite the buffer with the gradient
  std::uint32_t rounding;  // of moments in fewer bits: from seed and step
  float least_rms;         // adafactor: a step is relative to the parameter's root mean square, or to this
  float most_rms;          // adafactor: updates with a larger root mean square are clipped to it
  // Of muon: an iteration maps a singular value x to a x + b x^3 + c x^5.
  float iteration_a;
  float iteration_b;
  float iteration_c;
  float num_iterations;
};

/// Gives a range of elements its random bits: those of its first element come from this number.
struct Rounding {
  std::uint32_t number;
};

/// Points at one moment, in the one format whose array is not null.
struct MomentArray {
  float* fp32 = nullptr;
  std::uint16_t* bf16 = nullptr;
  std::uint8_t* codes = nullptr;  // 8 bit; with a sign in a first moment
  float* scales = nullptr;        // 8 bit: one for each block

  bool operator==(const MomentArray&) const = default;
};

/// Points at one unit's arrays, or a range of them. Arrays that format and rule do not use are null.
struct UnitArrays {
  float* master = nullptr;           // whole
  std::uint16_t* working = nullptr;  // split: the high halves
  std::uint16_t* low = nullptr;      // split: the low halves
  MomentArray m;                     // first moment, or momentum buffer
  MomentArray v;                     // second moment

  bool operator==(const UnitArrays&) const = default;
};

/// How many elements of a parameter one block of an undo log covers, counted from the parameter's beginning.
inline constexpr std::size_t kUndoBlock = 1024;

/// Begins an undo log. Both numbers are 0 before the first block is written.
struct UndoHeader {
  std::uint32_t num_used;  // slots
  std::uint32_t num_left;  // blocks without room, which keep their old values
};

/// Points at one block of an undo log (optim/undo_log.h).
struct UndoBlock {
  std::uint8_t* bytes;   // one for each element
  std::uint32_t* begin;  // the block's first slot, or kLeftOut
  UndoHeader* header;    // of the log
  std::uint32_t* slots;  // of the log
  std::uint32_t num_slots;
};
inline constexpr std::uint32_t kLeftOut = 0xffffffffu;

/// Lists the loops of one instruction set; null if this build has none.
struct UpdateKernels {
  /// Updates `count` elements.
  using Update = void (*)(const UnitArrays& arrays, const void* gradient, std::size_t count,
                          const UpdateScalars& scalars, const Rounding& rounding);
  /// Updates at most kUndoBlock elements, and logs how to undo it. If the log has no room, the block is as it was.
  /// Several threads may write blocks of one log.
  using Draft = void (*)(const UnitArrays& arrays, const void* gradient, std::size_t count,
                         const UpdateScalars& scalars, const Rounding& rounding, const UndoBlock& log);
  /// Undoes a draft of the same block, whose log has it, with the same gradient and scalars.
  using Undo = void (*)(const UnitArrays& arrays, const void* gradient, std::size_t count, const UpdateScalars& scalars,
                        const UndoBlock& log);
  /// Writes `scaled` = `gradient` times `factor` (or divided by it), in the gradient's dtype: fp32, or bf16 rounded to
  /// nearest even. The two may be the same array.
  using Scale = void (*)(const void* gradient, void* scaled, std::size_t count, float factor);

  /// Returns the sum of the squares, in double. Element i goes to sum i modulo kSumSpan, and these are added in order.
  /// Squares are exact, so every instruction set gives the same bits. If a square is not finite, the sum is not.
  using Sum = double (*)(const void* gradient, std::size_t count);

  /// Codes begin with a block. Rules without moments have only the fp32 version.
  struct Way {
    Update update = nullptr;
    Draft draft = nullptr;
    Undo undo = nullptr;
  };
  struct Ways {
    Way of[kNumStateFormats] = {};
  };

  /// Sums of squares of a stretch of one row.
  struct Squares {
    double of_gradient = 0.0;
    double of_parameter = 0.0;
  };
  /// Loops over a stretch of one row, at most kStretch elements: see optim/factored_kernels.inc. The update of an
  /// element is its gradient times `by_row` times its `by_column`, a product that is at most `most`.
  struct Factored {
    /// Adds the squares of the gradient to `by_column`.
    Squares (*squares)(const UnitArrays& arrays, const void* gradient, std::size_t count, float* by_column) = nullptr;
    /// Moves each second moment by `share` of the way to the gradient's square.
    Squares (*moments)(const UnitArrays& arrays, const void* gradient, std::size_t count, float share,
                       float* moments) = nullptr;
    /// Returns the sum of the squares of the updates.
    double (*updates)(const void* gradient, std::size_t count, float by_row, const float* by_column,
                      float most) = nullptr;
    /// Parameters decay by `decay`, then move by `step` times their updates.
    void (*apply)(const UnitArrays& arrays, const void* gradient, std::size_t count, float by_row,
                  const float* by_column, float most, float decay, float step) = nullptr;
  };

  Ways update[kNumElementwiseRules][kNumMasterFormats] = {};
  Factored factored[kNumMasterFormats] = {};
  /// Computes 1 / sqrt(value) of each.
  void (*inverse_roots)(const float* values, std::size_t count, float* roots) = nullptr;
  Scale scale[kNumMasterFormats] = {};
  Scale divide[kNumMasterFormats] = {};
  Sum sum[kNumMasterFormats] = {};
};

extern const UpdateKernels kBaselineKernels;
extern const UpdateKernels kAvx2Kernels;
extern const UpdateKernels kAvx512Kernels;
extern const UpdateKernels kSve2Kernels;

}  // namespace noria
