// Updates on one architecture, compared with those on another. The program needs neither torch, Python nor TBB.
//
//     update_vectors write FILE            what this machine's updates make of the samples
//     update_vectors compare FILE [SET]    does each instruction set (or SET) make the same? One line for each.
//     update_vectors adafactor [SET]       checksums of what updates of Adafactor make of samples
//
// Each case is a rule, a master and a format of moments. The samples are all combinations of special values as p, m, v
// and gradient, random bits, and edges: values for which an operation of the rule gives a result just below 2^-126. See
// csrc/optim/update.h, Note [Denormals]. Each case is updated; drafted and undone, if its rule can be. A NaN is like
// any other NaN.
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/errors.h"
#include "optim/factored.h"
#include "optim/moment_codes.h"
#include "optim/split_master.h"
#include "optim/update.h"

namespace noria {
namespace {

constexpr std::array<float, 2> kFactors{1.0f, -0.3f};

// ---- samples -------------------------------------------------------------------------------------------------------

std::vector<float> special_values() {
  using Limits = std::numeric_limits<float>;
  std::vector<float> values = {0.0f,   1.0f, Limits::infinity(), Limits::quiet_NaN(), 1e20f, Limits::min(),
                               1e-38f, 3e-5f};
  const std::size_t num_positive = values.size();
  for (std::size_t i = 0; i < num_positive; ++i) values.push_back(-values[i]);
  return values;
}

constexpr float kSmallest = 0x1p-126f;

struct Sample {
  float p, m, v, gradient;
};

// Is it a result that rounds up to the smallest normal? A long double holds it exactly, or nearly so.
bool is_edge(long double result) {
  const long double magnitude = std::abs(result), smallest = kSmallest;
  return magnitude < smallest && magnitude >= smallest * (1 - 0x1p-25L);
}

// Counts the edges among the operations of each rule, which this repeats: those that optim/update_rules.inc writes as
// `product` or `fused`.
class Edges {
 public:
  Edges(UpdateRule rule, const UpdateScalars& scalars) : rule_(rule), s_(scalars) {}

  /// Returns true if an operation on this sample is an edge.
  bool count(const Sample& x) {
    is_found_ = false;
    const bool is_adamw = rule_ == UpdateRule::adamw;
    if (is_adamw || rule_ == UpdateRule::adam) {
      const float g = is_adamw ? x.gradient : decayed(x);
      const float m = fused("m", s_.one_minus_beta1, g - x.m, x.m);
      const float v = fused("v", s_.one_minus_beta2, g * g - x.v, x.v);
      const float step = product("step", s_.negative_step, m) / std::fma(std::sqrt(v), s_.inverse_bias2_root, s_.eps);
      if (is_adamw) fused("p", x.p, s_.decay, step);
    } else if (rule_ == UpdateRule::sgd) {
      fused("p", s_.negative_step, decayed(x), x.p);
    } else if (rule_ == UpdateRule::sgd_momentum) {
      const float g = decayed(x);
      const float m = fused("m", s_.gradient_share, g, product("momentum", s_.momentum, x.m));
      fused("p", s_.negative_step, fused("nesterov", s_.momentum, m, g), x.p);
    } else if (rule_ == UpdateRule::muon_momentum) {
      const float m = fused("m", s_.one_minus_beta1, x.gradient - x.m, x.m);
      fused("nesterov", s_.one_minus_beta1, x.gradient - m, m);
    } else if (rule_ == UpdateRule::muon_step) {
      fused("p", s_.negative_step, x.gradient, fused("decay", x.p, s_.decay, x.p));
    }
    return is_found_;
  }

  std::map<std::string, int> counts;

 private:
  float decayed(const Sample& x) { return fused("decay", s_.decay, x.p, x.gradient); }
  float product(const char* name, float a, float b) { return fused(name, a, b, 0.0f); }
  float fused(const char* name, float a, float b, float c) {
    const bool is_one = is_edge(static_cast<long double>(a) * b + c);
    counts[name] += is_one ? 1 : 0;
    is_found_ = is_found_ || is_one;
    return std::fma(a, b, c);
  }

  UpdateRule rule_;
  UpdateScalars s_;
  bool is_found_ = false;
};

class Samples {
 public:
  Samples(UpdateRule rule, const UpdateScalars& scalars) : edges(rule, scalars), s_(scalars) {
    const std::vector<float> special = special_values();
    for (const float p : special) {
      for (const float m : special) {
        for (const float v : special) {
          for (const float g : special) all.push_back({p, m, v, g});
        }
      }
    }
    for (std::size_t i = 0, count = all.size() / 2; i < count; ++i) {
      const float p = any(), m = any(), v = any(), g = any();  // in this order with every compiler
      all.push_back({p, m, v, g});
    }
    add_edges();
    // Blocks whose gradients are so small that a moment's smallest code counts: four for first moments, four for
    // second.
    all.resize((all.size() + kStateBlock - 1) / kStateBlock * kStateBlock, Sample{});
    all.resize(all.size() + 4 * kStateBlock, {0.0f, 0.0f, 0.0f, 5 * kSmallest});
    all.resize(all.size() + 4 * kStateBlock, {0.0f, 0.0f, 0.0f, 0x1p-60f});
  }

  std::vector<Sample> all;
  Edges edges;

 private:
  float any() {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random_()));
    return value == value ? value : std::numeric_limits<float>::quiet_NaN();  // masters have no others
  }
  /// Returns a random number from 1 to 2.
  float fraction() { return std::bit_cast<float>(0x3f800000u | static_cast<std::uint32_t>(random_()) >> 9); }

  // What comes close to an edge, and the floats around it.
  void add_edges() {
    constexpr float kLarger = 5 * kSmallest;  // beside which a result that is flushed makes a difference
    for (int i = 0; i < 200; ++i) {
      const float near = i == 0 ? 0.0f : kSmallest * fraction() * (i % 2 == 0 ? 1.0f : 2.0f);
      const auto to = [&](float factor) { return (kSmallest - near) / factor; };
      const float again = s_.momentum * s_.momentum, decayed = std::fma(s_.decay, kLarger, near);
      const float pushed = (kSmallest - decayed) / s_.momentum - s_.gradient_share * decayed;
      for (int floats = -3; floats <= 3; ++floats) {
        const auto at = [&](float value) {
          for (int j = 0; j < std::abs(floats); ++j) value = std::nextafter(value, floats < 0 ? 0.0f : 2 * value);
          return value;
        };
        add({0.0f, near, 0.0f, at(to(s_.one_minus_beta1)) + near});
        add({0.0f, 0.0f, at(kSmallest / (1 - s_.one_minus_beta2)), 0.0f});
        add({0.0f, at(to(s_.negative_step)), 0.0f, at(to(s_.negative_step))});
        add({at(to(s_.decay)), 0.0f, 0.0f, near});
        add({at(to(s_.decay)), kLarger, 0.0f, near});
        add({0.0f, 0.0f, 0.0f, at(to(s_.negative_step))});
        add({0.0f, at(to(s_.momentum)), 0.0f, 0.0f});
        add({0.0f, 0.0f, 0.0f, at(to(s_.gradient_share))});
        add({0.0f, at(kSmallest / s_.negative_step / again), 0.0f, 0.0f});
        add({kLarger, at(pushed / s_.momentum), 0.0f, near});
        add({at(kSmallest / (1 + s_.decay)), 0.0f, 0.0f, 0.0f});
        const float g = near - (near - kSmallest) / s_.one_minus_beta1;
        add({0.0f, (near - s_.one_minus_beta1 * g) / (1 - s_.one_minus_beta1), 0.0f, at(g)});
      }
    }
  }
  void add(const Sample& sample) {
    for (const float value : {sample.p, sample.m, sample.v, sample.gradient}) {
      if (!std::isfinite(value) || (value != 0.0f && std::abs(value) < kSmallest)) return;
    }
    if (edges.count(sample)) all.push_back(sample);
  }

  UpdateScalars s_;
  std::mt19937 random_{3};
};

// ---- arrays --------------------------------------------------------------------------------------------------------

struct Case {
  UpdateRule rule;
  bool is_split;
  StateFormat state;
};

template <class Element>
using Array = std::vector<Element>;

// What an update reads and writes; arrays that a case does not have are empty.
struct Arrays {
  Array<float> master, m, v, scales_m, scales_v;
  Array<std::uint16_t> working, low, narrow_m, narrow_v;
  Array<std::uint8_t> codes_m, codes_v;

  template <class Self, class Do>
  static void each(Self& self, const Do& act) {
    act(self.master), act(self.m), act(self.v), act(self.scales_m), act(self.scales_v);
    act(self.working), act(self.low), act(self.narrow_m), act(self.narrow_v);
    act(self.codes_m), act(self.codes_v);
  }
};

template <class Element>
Element* begin_of(Array<Element>& array) {
  return array.empty() ? nullptr : array.data();
}

std::uint16_t high_half(float value) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16); }

// Codes of a moment. The scales are special values, and in every other block such that one of its codes is an edge.
void make_codes(Array<std::uint8_t>& codes, Array<float>& scales, std::size_t count, bool is_first) {
  const std::vector<float> special = special_values();
  std::mt19937 random(5);
  bool has_edges = false;
  for (std::size_t i = 0; i < count; ++i) codes.push_back(static_cast<std::uint8_t>(random()));
  for (std::size_t at = 0, block = 0; at < count; at += kStateBlock, ++block) {
    float scale = std::abs(special[block / 2 % special.size()]);
    if (scale != scale) scale = 1.0f;
    for (std::size_t i = at; block % 2 == 0 && i < at + kStateBlock && i < count; ++i) {
      const float one = 1.0f;
      float share = 0.0f;
      decode_moment(&codes[i], &one, &share, 1, is_first);
      const float edge = kSmallest / std::abs(share);
      if (is_edge(static_cast<long double>(edge) * share)) {
        scale = edge;
        has_edges = true;
        break;
      }
    }
    scales.push_back(scale);
  }
  NORIA_INVARIANT(has_edges, "no code is an edge");
}

Arrays made_of(const std::vector<Sample>& samples, const Case& one) {
  Arrays arrays;
  for (const Sample& sample : samples) {
    if (one.is_split) {
      split_master(&sample.p, &arrays.working.emplace_back(), &arrays.low.emplace_back(), 1);
    } else {
      arrays.master.push_back(sample.p);
    }
    const int moments = num_moments(one.rule);
    if (one.state == StateFormat::fp32 && moments > 0) arrays.m.push_back(sample.m);
    if (one.state == StateFormat::fp32 && moments > 1) arrays.v.push_back(sample.v);
    if (one.state == StateFormat::bf16 && moments > 0) arrays.narrow_m.push_back(high_half(sample.m));
    if (one.state == StateFormat::bf16 && moments > 1) arrays.narrow_v.push_back(high_half(sample.v));
  }
  if (one.state == StateFormat::eight_bit) {
    make_codes(arrays.codes_m, arrays.scales_m, samples.size(), true);
    if (num_moments(one.rule) > 1) make_codes(arrays.codes_v, arrays.scales_v, samples.size(), false);
  }
  return arrays;
}

bool is_same(float a, float b) {
  return (a != a && b != b) || std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}
float widened(std::uint16_t high) { return std::bit_cast<float>(static_cast<std::uint32_t>(high) << 16); }
bool is_same(std::uint16_t a, std::uint16_t b) { return is_same(widened(a), widened(b)); }
bool is_same(std::uint8_t a, std::uint8_t b) { return a == b; }

template <class Element>
std::size_t num_different(const Array<Element>& a, const Array<Element>& b) {
  std::size_t found = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) found += is_same(a[i], b[i]) ? 0 : 1;
  return found;
}

std::size_t num_different(const Arrays& a, const Arrays& b) {
  std::size_t found = num_different(a.master, b.master) + num_different(a.m, b.m) + num_different(a.v, b.v) +
                      num_different(a.scales_m, b.scales_m) + num_different(a.scales_v, b.scales_v) +
                      num_different(a.narrow_m, b.narrow_m) + num_different(a.narrow_v, b.narrow_v) +
                      num_different(a.codes_m, b.codes_m) + num_different(a.codes_v, b.codes_v);
  for (std::size_t i = 0; i < a.working.size(); ++i) {
    const bool is_nan =
        widened(a.working[i]) != widened(a.working[i]) && widened(b.working[i]) != widened(b.working[i]);
    found += is_nan || (a.working[i] == b.working[i] && a.low[i] == b.low[i]) ? 0 : 1;
  }
  return found;
}

// ---- files ---------------------------------------------------------------------------------------------------------

template <class Value>
void write_one(std::ostream& file, const Value& value) {
  file.write(reinterpret_cast<const char*>(&value), sizeof value);
}

template <class Value>
void read_one(std::istream& file, Value& value) {
  file.read(reinterpret_cast<char*>(&value), sizeof value);
}

template <class Element>
void write(std::ostream& file, const Array<Element>& array) {
  const std::uint64_t count = array.size();
  write_one(file, count);
  file.write(reinterpret_cast<const char*>(array.data()), static_cast<std::streamsize>(count * sizeof(Element)));
}

template <class Element>
void read(std::istream& file, Array<Element>& array) {
  std::uint64_t count = 0;
  read_one(file, count);
  array.resize(count);
  file.read(reinterpret_cast<char*>(array.data()), static_cast<std::streamsize>(count * sizeof(Element)));
}

// One case: what goes in, and what must come out.
struct Vector {
  Case one;
  UpdateScalars scalars;
  Array<float> gradient;
  Array<std::uint16_t> narrow_gradient;
  Arrays before, after;
  double sum = 0.0;  // of the gradient's squares
};

void write(std::ostream& file, const Vector& vector) {
  write_one(file, vector.one);
  write_one(file, vector.scalars);
  write_one(file, vector.sum);
  write(file, vector.gradient);
  write(file, vector.narrow_gradient);
  for (const Arrays* arrays : {&vector.before, &vector.after}) {
    Arrays::each(*arrays, [&](const auto& array) { write(file, array); });
  }
}

// Returns false at the end of the file.
bool read(std::istream& file, Vector& vector) {
  read_one(file, vector.one);
  read_one(file, vector.scalars);
  read_one(file, vector.sum);
  read(file, vector.gradient);
  read(file, vector.narrow_gradient);
  for (Arrays* arrays : {&vector.before, &vector.after}) {
    Arrays::each(*arrays, [&](auto& array) { read(file, array); });
  }
  return file.good();
}

// ---- updates -------------------------------------------------------------------------------------------------------

UpdateJob job_of(Vector& vector, Arrays& arrays) {
  UpdateJob job;
  job.rule = vector.one.rule;
  job.arrays = {begin_of(arrays.master), begin_of(arrays.working), begin_of(arrays.low), {}, {}};
  job.arrays.m = {begin_of(arrays.m), begin_of(arrays.narrow_m), begin_of(arrays.codes_m), begin_of(arrays.scales_m)};
  job.arrays.v = {begin_of(arrays.v), begin_of(arrays.narrow_v), begin_of(arrays.codes_v), begin_of(arrays.scales_v)};
  job.gradient = vector.one.is_split ? static_cast<const void*>(vector.narrow_gradient.data())
                                     : static_cast<const void*>(vector.gradient.data());
  UpdatePiece& piece = job.pieces.emplace_back();
  piece.count = static_cast<std::int64_t>(vector.one.is_split ? vector.narrow_gradient.size() : vector.gradient.size());
  piece.scalars = vector.scalars;
  return job;
}

void run(const UpdateJob& job, const std::string& set) {
  check(job);
  update_elements(job, job.pieces[0], 0, job.pieces[0].count, set);
}

// Returns how many values are wrong: of the update, its draft, the undo of that, and the sum of squares.
std::size_t num_different(Vector& vector, const std::string& set) {
  Arrays updated = vector.before;
  const UpdateJob update = job_of(vector, updated);
  run(update, set);
  std::size_t found = num_different(updated, vector.after);
  const double sum = sum_of_squares(update, update.pieces[0], 0, update.pieces[0].count, set);
  found += (sum != sum && vector.sum != vector.sum) || sum == vector.sum ? 0 : 1;

  if (!can_be_drafted(vector.one.rule)) return found;
  Arrays drafted = vector.before;
  UpdateJob draft = job_of(vector, drafted);
  const std::int64_t count = draft.pieces[0].count;
  const UndoLogSize size{count, num_undo_blocks(count), 4 * count};
  std::vector<std::byte> memory(static_cast<std::size_t>(undo_log_bytes(size).count) + 64);
  auto* begin = reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64);
  make_draft(draft, undo_log_at(begin, size));
  begin_draft(draft);
  run(draft, set);
  found += draft.log.header->num_left + num_different(drafted, vector.after);
  run(undo_of(draft), set);
  return found + num_different(drafted, vector.before);
}

// Hyperparameters for which each operation has edges; there are others for which some have none.
UpdateHyper hyper_of(float factor) {
  UpdateHyper hyper;
  hyper.lr = 0.019, hyper.weight_decay = 0.13, hyper.beta2 = 0.984;
  hyper.momentum = 0.87, hyper.dampening = 0.13, hyper.nesterov = true;
  hyper.factor = factor;
  hyper.divisor = factor == 1.0f ? 1.0f : 3.0f;
  return hyper;
}

// Throws if an operation of a rule has no edge among the samples, as fp32.
std::vector<Vector> made() {
  std::vector<Vector> vectors;
  for (int number = 0; number < kNumElementwiseRules; ++number) {
    const auto rule = static_cast<UpdateRule>(number);
    for (const float factor : kFactors) {
      const UpdateScalars scalars = update_scalars(rule, hyper_of(factor), 3, 11);
      const Samples samples(rule, scalars);
      for (const auto& [operation, count] : samples.edges.counts) {
        NORIA_INVARIANT(count > 0, std::string(to_string(rule)) + " has no edge of its operation " + operation);
      }
      for (const bool is_split : {false, true}) {
        for (int state = 0; state < (num_moments(rule) > 0 ? kNumStateFormats : 1); ++state) {
          Vector& vector = vectors.emplace_back();
          vector.one = {rule, is_split, static_cast<StateFormat>(state)};
          vector.scalars = scalars;
          for (const Sample& sample : samples.all) {
            if (is_split) vector.narrow_gradient.push_back(high_half(sample.gradient));
            else vector.gradient.push_back(sample.gradient);
          }
          vector.before = made_of(samples.all, vector.one);
          vector.after = vector.before;
          const UpdateJob job = job_of(vector, vector.after);
          run(job, "");
          vector.sum = sum_of_squares(job, job.pieces[0], 0, job.pieces[0].count);
        }
      }
    }
  }
  return vectors;
}

std::string name_of(const Case& one) {
  const std::array<const char*, kNumStateFormats> states{"fp32", "bf16", "8bit"};
  return std::string(to_string(one.rule)) + (one.is_split ? ", split, " : ", whole, ") +
         states.at(static_cast<std::size_t>(one.state));
}

int compare(const std::string& path, const std::string& wanted) {
  int result = 0;
  for (const std::string& set : wanted.empty() ? instruction_sets() : std::vector<std::string>{wanted}) {
    std::ifstream file(path, std::ios::binary);
    std::size_t num_vectors = 0, num_elements = 0;
    for (Vector vector; read(file, vector); ++num_vectors) {
      num_elements += vector.gradient.size() + vector.narrow_gradient.size();
      if (const std::size_t found = num_different(vector, set); found > 0) {
        std::cout << set << ": " << found << " elements differ: " << name_of(vector.one) << "\n";
        result = 1;
      }
    }
    std::cout << set << ": compared " << num_vectors << " cases, " << num_elements << " elements\n";
    if (num_vectors == 0) result = 1;
  }
  return result;
}

// ---- adafactor -----------------------------------------------------------------------------------------------------

// Kinds of values, as std::fpclassify names them.
struct Kind {
  int number;
  const char* name;
};
constexpr std::array<Kind, 4> kKinds{
    {{FP_NORMAL, "usual"}, {FP_SUBNORMAL, "tiny"}, {FP_INFINITE, "infinite"}, {FP_NAN, "not a number"}}};

// Returns floats with random bits. Usual ones have magnitudes between 2^-30 and 2^2, so that no sum overflows. One in
// 300 is infinite, or not a number, if that is the kind. Tiny ones are zeros, denormals, the smallest normals, and
// floats whose squares are denormals or next to 2^-126.
std::vector<float> values_of(const Kind& kind, std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (float& value : values) {
    const auto bits = static_cast<std::uint32_t>(random()), exponent = bits >> 23;
    const std::uint32_t sign = bits & 0x80000000u, fraction = bits & 0x7fffffu;
    value = std::bit_cast<float>(sign | (97u + exponent % 32u) << 23 | fraction);
    const auto choice = static_cast<std::uint32_t>(random());
    if (kind.number == FP_SUBNORMAL) {
      constexpr std::uint32_t kRoot = 64u << 23;  // 2^-63
      const std::array<std::uint32_t, 5> tiny{0u, fraction, 1u << 23 | fraction, kRoot + fraction % 7u - 4u,
                                              (52u + exponent % 12u) << 23 | fraction};
      value = std::bit_cast<float>(sign | tiny.at(choice % tiny.size()));
    } else if (kind.number == FP_INFINITE && choice % 300 == 0) {
      value = std::bit_cast<float>(sign | 0x7f800000u);
    } else if (kind.number == FP_NAN && choice % 300 == 0) {
      value = std::numeric_limits<float>::quiet_NaN();
    }
  }
  return values;
}

// What has come out of updates: FNV-1a of its bytes, in which one NaN is like any other, and how many values of each
// kind there are.
struct Outcome {
  std::uint64_t checksum = 0xcbf29ce484222325u;
  std::map<int, std::size_t> counts;  // by number of a kind

  void add(const std::vector<float>& values) {
    for (const float value : values) {
      ++counts[std::fpclassify(value)];
      const auto bits = std::bit_cast<std::uint32_t>(value == value ? value : std::numeric_limits<float>::quiet_NaN());
      for (int shift = 0; shift < 32; shift += 8) checksum = (checksum ^ ((bits >> shift) & 0xffu)) * 0x100000001b3u;
    }
  }
};

// Four steps of parameters of several shapes.
Outcome updated_by_adafactor(const Kind& of_parameter, const Kind& of_gradient, const std::string& set) {
  struct Shape {
    std::int64_t num_matrices, num_rows, num_columns;
    bool is_matrix;
  };
  const std::vector<Shape> shapes{{1, 70, 2100, true}, {5, 9, 33, true}, {1, 200, 3, true}, {1, 1, 5000, false}};
  Outcome outcome;
  std::uint32_t seed = 0;
  for (const Shape& shape : shapes) {
    for (const bool is_split : {false, true}) {
      const auto count = static_cast<std::size_t>(shape.num_matrices * shape.num_rows * shape.num_columns);
      std::vector<float> master = values_of(of_parameter, count, ++seed);
      std::vector<std::uint16_t> working(count), low(count), narrow;
      split_master(master.data(), working.data(), low.data(), count);
      std::vector<float> by_row(static_cast<std::size_t>(shape.num_matrices * shape.num_rows));
      std::vector<float> by_column(count / static_cast<std::size_t>(shape.is_matrix ? shape.num_rows : 1));
      for (std::int64_t step = 1; step <= 4; ++step) {
        const std::vector<float> gradient = values_of(of_gradient, count, ++seed);
        narrow.clear();
        for (const float each : gradient) narrow.push_back(high_half(each));
        UpdateJob job;
        job.rule = UpdateRule::adafactor;
        if (is_split) job.arrays.working = working.data(), job.arrays.low = low.data();
        else job.arrays.master = master.data();
        job.gradient = is_split ? static_cast<const void*>(narrow.data()) : gradient.data();
        UpdatePiece& piece = job.pieces.emplace_back();
        piece.count = static_cast<std::int64_t>(count);
        // The smaller eps lets factors of tiny gradients grow without a limit.
        UpdateHyper hyper{.lr = 0.019, .eps = step < 3 ? 0x1p-23 : 0x1p-100, .weight_decay = 0.13};
        hyper.factor = step == 3 ? 0.3 : 1.0;
        piece.scalars = update_scalars(job.rule, hyper, step);
        piece.factored = {shape.num_matrices, shape.num_rows, shape.num_columns,
                          shape.is_matrix ? by_row.data() : nullptr, by_column.data()};
        check(job);
        FactoredUpdate().run(job, for_each_here, [] {}, set);
        if (is_split) join_master(working.data(), low.data(), master.data(), count);
        for (const auto* values : {&master, &by_row, &by_column}) outcome.add(*values);
      }
    }
  }
  return outcome;
}

// Prints a line for each two kinds. Throws if none of the values that come out are of a kind.
void print_adafactor(const std::string& set) {
  for (const Kind& of_parameter : kKinds) {
    for (const Kind& of_gradient : kKinds) {
      Outcome outcome = updated_by_adafactor(of_parameter, of_gradient, set);
      const std::string name = std::string(of_parameter.name) + " parameter, " + of_gradient.name + " gradient";
      NORIA_INVARIANT(outcome.counts[of_gradient.number] > 0, "no result is of the gradient's kind: " + name);
      std::cout << name << ": " << std::hex << outcome.checksum << std::dec << "\n";
    }
  }
}

}  // namespace
}  // namespace noria

int main(int count, char** arguments) {
  const std::vector<std::string> words(arguments + 1, arguments + count);
  if (words.size() == 2 && words[0] == "write") {
    std::ofstream file(words[1], std::ios::binary);
    for (const noria::Vector& vector : noria::made()) noria::write(file, vector);
    return file.good() ? 0 : 1;
  }
  if ((words.size() == 2 || words.size() == 3) && words[0] == "compare") {
    return noria::compare(words[1], words.size() == 3 ? words[2] : "");
  }
  if (!words.empty() && words.size() <= 2 && words[0] == "adafactor") {
    noria::print_adafactor(words.size() == 2 ? words[1] : "");
    return 0;
  }
  std::cerr << "expected: write FILE, compare FILE [SET], or adafactor [SET]\n";
  return 2;
}
