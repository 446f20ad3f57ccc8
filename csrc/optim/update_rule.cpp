// Names the rules and the number of moments that each keeps, and computes hyperparameters in the form that the formulas
// use.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "base/errors.h"
#include "optim/update.h"

namespace noria {
namespace {

struct Described {
  std::string_view name;
  int num_moments;
};

// S. Vigna's "splitmix64": it makes neighbouring seeds and steps unrelated.
std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::uint32_t rounding_key(std::uint64_t seed, std::int64_t step) {
  constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15u;
  return static_cast<std::uint32_t>(mixed(mixed(seed + kOdd) + static_cast<std::uint64_t>(step) * kOdd) >> 32);
}

constexpr std::array<Described, kNumRules> kRules{{{"adamw", 2},
                                                   {"adam", 2},
                                                   {"sgd", 0},
                                                   {"sgd_momentum", 1},
                                                   {"lion", 1},
                                                   {"muon_step", 0},
                                                   {"muon_momentum", 1},
                                                   {"adafactor", 0},
                                                   {"muon", 1}}};

}  // namespace

std::string_view to_string(UpdateRule rule) { return kRules.at(static_cast<std::size_t>(rule)).name; }

UpdateRule parse_update_rule(std::string_view text) {
  std::string known;
  for (std::size_t i = 0; i < kRules.size(); ++i) {
    if (kRules[i].name == text) return static_cast<UpdateRule>(i);
    known += (known.empty() ? "" : ", ") + std::string(kRules[i].name);
  }
  throw UsageError("an update rule", "\"" + std::string(text) + "\"", "use one of " + known);
}

int num_moments(UpdateRule rule) { return kRules.at(static_cast<std::size_t>(rule)).num_moments; }

bool have_same_bits(const UpdateScalars& a, const UpdateScalars& b) {
  using Bits = std::array<std::uint32_t, sizeof(UpdateScalars) / sizeof(std::uint32_t)>;
  return std::bit_cast<Bits>(a) == std::bit_cast<Bits>(b);
}

UpdateScalars update_scalars(UpdateRule rule, const UpdateHyper& hyper, std::int64_t step, std::uint64_t seed) {
  if (step < 1) throw UsageError("a step that counts from 1", std::to_string(step), "count the step before the update");
  const bool is_adam = rule == UpdateRule::adamw || rule == UpdateRule::adam;
  const bool is_factored = rule == UpdateRule::adafactor;
  const bool is_muon = rule == UpdateRule::muon || rule == UpdateRule::muon_momentum || rule == UpdateRule::muon_step;
  const bool is_decoupled = rule == UpdateRule::adamw || rule == UpdateRule::lion || is_factored || is_muon;
  // Computes powers in double: in float they differ from torch's within a thousand steps.
  const double bias1 = is_adam ? 1.0 - std::pow(hyper.beta1, static_cast<double>(step)) : 1.0;
  const double bias2 = is_adam ? 1.0 - std::pow(hyper.beta2, static_cast<double>(step)) : 1.0;
  const auto count = static_cast<double>(step);
  const double lr = is_factored ? std::min(hyper.lr, 1.0 / std::sqrt(count)) : hyper.lr / bias1;
  const double share = is_factored ? std::pow(count, hyper.beta2_decay) : 1.0 - hyper.beta2;
  UpdateScalars scalars{};
  scalars.divisor = static_cast<float>(hyper.divisor);
  scalars.prefactor = static_cast<float>(hyper.prefactor);
  scalars.factor = static_cast<float>(hyper.maximize ? -hyper.factor : hyper.factor);
  scalars.decay = static_cast<float>(is_decoupled ? -hyper.lr * hyper.weight_decay : hyper.weight_decay);
  scalars.negative_step = static_cast<float>(-lr);
  scalars.one_minus_beta1 = static_cast<float>(1.0 - (is_muon ? hyper.momentum : hyper.beta1));
  scalars.one_minus_beta2 = static_cast<float>(share);
  scalars.inverse_bias2_root = static_cast<float>(1.0 / std::sqrt(bias2));
  scalars.eps = static_cast<float>(hyper.eps);
  scalars.momentum = static_cast<float>(hyper.momentum);
  scalars.gradient_share = static_cast<float>(1.0 - hyper.dampening);
  scalars.nesterov = hyper.nesterov ? 1.0f : 0.0f;
  scalars.is_first = step == 1 ? 1.0f : 0.0f;
  scalars.rounding = rounding_key(seed, step);
  scalars.least_rms = static_cast<float>(hyper.least_rms);
  scalars.most_rms = static_cast<float>(hyper.most_rms);
  scalars.iteration_a = static_cast<float>(hyper.iteration[0]);
  scalars.iteration_b = static_cast<float>(hyper.iteration[1]);
  scalars.iteration_c = static_cast<float>(hyper.iteration[2]);
  scalars.num_iterations = static_cast<float>(hyper.num_iterations);
  return scalars;
}

}  // namespace noria
