// What the translation units per instruction set share with their driver: arrays, scalars, and a table of loops.
//
// Kept apart from optim/update.h, and free of the standard library, because these files are compiled for instruction
// sets that the running machine may lack: an inline function that leaked out of them could be the copy that the linker
// keeps for everybody.
#pragma once

#include <cstddef>
#include <cstdint>

namespace noria {

/// What turns a gradient into a new value; the formulas are in optim/update_rules.inc. SGD without momentum keeps no
/// state, so it is a rule of its own.
enum class UpdateRule : std::uint8_t { adamw, adam, sgd, sgd_momentum, lion };
inline constexpr int kNumRules = 5;

/// How the fp32 master is kept: as itself (it is the working copy), or split; see optim/split_master.h.
enum class MasterFormat : std::uint8_t { whole, split };
inline constexpr int kNumMasterFormats = 2;

/// How moments are kept; see optim/update.h, Note [State formats].
enum class StateFormat : std::uint8_t { fp32, bf16, eight_bit };
inline constexpr int kNumStateFormats = 3;
/// Elements of a parameter that share a scale where moments are codes, counted from the parameter's beginning.
inline constexpr std::size_t kStateBlock = 256;

/// The hyperparameters as the formulas want them, each rounded once from double; made by `update_scalars`. A rule reads
/// those that it has a name for.
struct UpdateScalars {
  // The gradient over the first, times the second, times the third, is what the rule sees: each rounded to its dtype.
  float divisor;
  float prefactor;
  float factor;
  float decay;          // adamw, lion: -lr * weight_decay; adam, sgd: weight_decay
  float negative_step;  // adamw, adam: -lr / (1 - beta1^step); else -lr
  float one_minus_beta1;
  float one_minus_beta2;
  float inverse_bias2_root;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float momentum;
  float gradient_share;  // 1 - dampening
  // 0 or 1, and floats: a loop over halves of a master is not vectorised with conditions of another size.
  float nesterov;
  float is_first;          // of sgd_momentum: the buffer becomes the gradient, whatever it holds
  std::uint32_t rounding;  // of moments in fewer bits: from seed and step
};

/// What the random bits of a range of elements are made of: a key, and the number of its first element.
struct Rounding {
  std::uint32_t key;
  std::uint32_t first;
};

/// One moment, in the one format whose array is not null.
struct MomentArray {
  float* fp32 = nullptr;
  std::uint16_t* bf16 = nullptr;
  std::uint8_t* codes = nullptr;  // 8 bit; of a first moment with a sign
  float* scales = nullptr;        // 8 bit: one for each block

  bool operator==(const MomentArray&) const = default;
};

/// One unit's arrays, or one range of them; what format and rule have no use for is null.
struct UnitArrays {
  float* master = nullptr;           // whole
  std::uint16_t* working = nullptr;  // split: the high halves
  std::uint16_t* low = nullptr;      // split: the low halves
  MomentArray m;                     // first moment, or momentum buffer
  MomentArray v;                     // second moment
};

/// One instruction set's loops; null where this build has none.
struct UpdateKernels {
  /// In place `to` is not looked at; a draft writes it, and it shares no element with `from`. The stores of a draft are
  /// seen by others after a fence, which is the caller's.
  using Update = void (*)(const UnitArrays& from, const UnitArrays& to, const void* gradient, std::size_t count,
                          const UpdateScalars& scalars, const Rounding& rounding);
  /// `scaled` = `gradient` times `factor`, in the gradient's dtype: fp32, or bf16 rounded to nearest even.
  /// The two may be one array. Or divided by it.
  using Scale = void (*)(const void* gradient, void* scaled, std::size_t count, float factor);

  /// The sum of the squares, in double: element i goes to the i-th of 32 sums, modulo, which are added in their order.
  /// Squares are exact, so every instruction set gives the same bits; one that is not finite makes the sum so.
  using Sum = double (*)(const void* gradient, std::size_t count);

  /// Codes begin with a block; rules without moments have an fp32 way alone.
  struct Ways {
    Update of[kNumStateFormats][2] = {};  // [2]: in place, draft
  };

  Ways update[kNumRules][kNumMasterFormats] = {};
  Scale scale[kNumMasterFormats] = {};
  Scale divide[kNumMasterFormats] = {};
  Sum sum[kNumMasterFormats] = {};
};

extern const UpdateKernels kBaselineKernels;
extern const UpdateKernels kAvx2Kernels;
extern const UpdateKernels kAvx512Kernels;

}  // namespace noria
