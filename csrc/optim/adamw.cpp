#include "optim/adamw.h"

#include <bit>
#include <cmath>
#include <utility>

#include "base/errors.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace noria {
namespace {

// FTZ and DAZ for as long as it lives; what the thread had before comes back, whatever happens. On other architectures
// denormals are computed: slower, and the one place where their bits may differ.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
#else
  FlushDenormals() {}
#endif
  FlushDenormals(const FlushDenormals&) = delete;  // one restore for one save
  FlushDenormals& operator=(const FlushDenormals&) = delete;

#if defined(__x86_64__)
 private:
  static constexpr unsigned kFlushToZero = 0x8000;
  static constexpr unsigned kDenormalsAreZero = 0x0040;
  const unsigned saved_;
#endif
};

using NamedKernels = std::pair<std::string, AdamWKernels>;

std::vector<NamedKernels> find_kernels() {
  std::vector<NamedKernels> found{{"baseline", kAdamWBaseline}};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  if (avx2 && kAdamWAvx2.split != nullptr) found.emplace_back("avx2", kAdamWAvx2);
  if (avx512 && kAdamWAvx512.split != nullptr) found.emplace_back("avx512", kAdamWAvx512);
#endif
  return found;
}

const std::vector<NamedKernels>& all_kernels() {
  static const std::vector<NamedKernels> kernels = find_kernels();
  return kernels;
}

const AdamWKernels& kernels_for(const std::string& instruction_set) {
  const auto& kernels = all_kernels();
  if (instruction_set.empty()) return kernels.back().second;
  std::string known;
  for (const auto& [name, entries] : kernels) {
    if (name == instruction_set) return entries;
    known += (known.empty() ? "" : ", ") + name;
  }
  throw UsageError("an instruction set of this build and machine (" + known + ")", "\"" + instruction_set + "\"",
                   "leave it out: the widest is taken");
}

}  // namespace

AdamWScalars adamw_scalars(const AdamWHyper& hyper, std::int64_t step) {
  if (step < 1) throw UsageError("a step that counts from 1", std::to_string(step), "count the step before the update");
  // Powers in double: in float they drift from torch's within a thousand steps.
  const double bias1 = 1.0 - std::pow(hyper.beta1, static_cast<double>(step));
  const double bias2 = 1.0 - std::pow(hyper.beta2, static_cast<double>(step));
  AdamWScalars scalars{};
  scalars.gradient_sign = hyper.maximize ? -1.0f : 1.0f;
  scalars.decay = static_cast<float>(-hyper.lr * hyper.weight_decay);
  scalars.one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1);
  scalars.beta2 = static_cast<float>(hyper.beta2);
  scalars.one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2);
  scalars.negative_step = static_cast<float>(-hyper.lr / bias1);
  scalars.inverse_bias2_root = static_cast<float>(1.0 / std::sqrt(bias2));
  scalars.eps = static_cast<float>(hyper.eps);
  return scalars;
}

std::vector<std::string> adamw_instruction_sets() {
  std::vector<std::string> names;
  for (const auto& [name, entries] : all_kernels()) names.push_back(name);
  return names;
}

void adamw_fp32(float* master, float* m, float* v, const float* gradient, std::size_t count,
                const AdamWScalars& scalars, const std::string& instruction_set) {
  const AdamWKernels& kernels = kernels_for(instruction_set);
  const FlushDenormals flush;
  kernels.fp32(master, m, v, gradient, count, scalars);
}

void adamw_split(std::uint16_t* high, std::uint16_t* low, float* m, float* v, const std::uint16_t* gradient,
                 std::size_t count, const AdamWScalars& scalars, const std::string& instruction_set) {
  const AdamWKernels& kernels = kernels_for(instruction_set);
  const FlushDenormals flush;
  kernels.split(high, low, m, v, gradient, count, scalars);
}

void split_master(const float* master, std::uint16_t* high, std::uint16_t* low, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(master[i]);
    high[i] = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
    if (low != nullptr) low[i] = static_cast<std::uint16_t>(bits);
  }
}

void join_master(const std::uint16_t* high, const std::uint16_t* low, float* master, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto remainder = static_cast<std::int32_t>(static_cast<std::int16_t>(low[i]));
    master[i] =
        std::bit_cast<float>((static_cast<std::uint32_t>(high[i]) << 16) + static_cast<std::uint32_t>(remainder));
  }
}

}  // namespace noria
