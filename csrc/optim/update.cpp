#include "optim/update.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/errors.h"
#include "optim/flush_denormals.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace noria {
namespace {

// Elements of a gradient that are multiplied at once: they stay in the first cache until the rule has read them.
constexpr std::size_t kBlock = 2048;

using NamedKernels = std::pair<std::string, const UpdateKernels*>;

std::vector<NamedKernels> find_kernels() {
  std::vector<NamedKernels> found{{"baseline", &kBaselineKernels}};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  if (avx2 && kAvx2Kernels.scale[0] != nullptr) found.emplace_back("avx2", &kAvx2Kernels);
  if (avx512 && kAvx512Kernels.scale[0] != nullptr) found.emplace_back("avx512", &kAvx512Kernels);
#endif
  return found;
}

const std::vector<NamedKernels>& all_kernels() {
  static const std::vector<NamedKernels> kernels = find_kernels();
  return kernels;
}

const UpdateKernels& kernels_for(const std::string& instruction_set) {
  const auto& kernels = all_kernels();
  if (instruction_set.empty()) return *kernels.back().second;
  std::string known;
  for (const auto& [name, entries] : kernels) {
    if (name == instruction_set) return *entries;
    known += (known.empty() ? "" : ", ") + name;
  }
  throw UsageError("an instruction set of this build and machine (" + known + ")", "\"" + instruction_set + "\"",
                   "leave it out: the widest is taken");
}

MasterFormat format_of(const UnitArrays& arrays) {
  return arrays.working != nullptr ? MasterFormat::split : MasterFormat::whole;
}

bool same(const UnitArrays& a, const UnitArrays& b) {
  return a.master == b.master && a.working == b.working && a.low == b.low && a.m == b.m && a.v == b.v;
}

template <class Element>
Element* at(Element* array, std::size_t offset) {
  return array != nullptr ? array + offset : nullptr;
}

UnitArrays at(const UnitArrays& arrays, std::size_t offset) {
  return {at(arrays.master, offset), at(arrays.working, offset), at(arrays.low, offset), at(arrays.m, offset),
          at(arrays.v, offset)};
}

// Streaming stores are ordered by nothing else, not even by the release of a mutex.
void end_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace

bool UpdateJob::in_place() const { return same(from, to); }

Bytes UpdateJob::gradient_bytes() const {
  Bytes sum;
  for (const UpdatePiece& piece : pieces) sum += Bytes{piece.count * gradient_item_bytes()};
  return sum;
}

Bytes UpdateJob::bytes() const {
  if (task == UpdateTask::sum) return gradient_bytes();
  std::int64_t elements = 0;
  for (const UpdatePiece& piece : pieces) elements += piece.count;
  const std::int64_t gradient_size = format_of(from) == MasterFormat::split ? 2 : 4;
  return Bytes{8 + gradient_size + 8 * num_moments(rule)} * elements;
}

void check(const UpdateJob& job) {
  const int moments = num_moments(job.rule);
  for (const UnitArrays* arrays : {&job.from, &job.to}) {
    const bool split = arrays->working != nullptr;
    NORIA_INVARIANT(split == (arrays->low != nullptr) && split == (arrays->master == nullptr),
                    "an update is of an fp32 master, or of a working copy with its low bits");
    NORIA_INVARIANT((arrays->m != nullptr) == (moments > 0) && (arrays->v != nullptr) == (moments > 1),
                    "an update has as many moments as its rule keeps");
  }
  NORIA_INVARIANT(job.gradient != nullptr, "an update lacks its gradient");
  NORIA_INVARIANT(format_of(job.from) == format_of(job.to), "an update changes the format of its master");
  const bool apart = job.from.master != job.to.master || job.from.working != job.to.working;
  NORIA_INVARIANT(job.in_place() ||
                      (apart && (job.from.low == nullptr || job.from.low != job.to.low) &&
                       (moments < 1 || job.from.m != job.to.m) && (moments < 2 || job.from.v != job.to.v)),
                  "an update is in place, or shares no array with what it reads");
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  for (const UpdatePiece& piece : job.pieces) {
    NORIA_INVARIANT(piece.offset >= 0 && piece.count >= 0, "a piece of an update has no range");
    if (piece.count > 0) ranges.emplace_back(piece.offset, piece.offset + piece.count);
  }
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    NORIA_INVARIANT(ranges[i - 1].second <= ranges[i].first, "pieces of an update overlap");
  }
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const auto& [name, entries] : all_kernels()) names.push_back(name);
  return names;
}

double sum_of_squares(const UpdateJob& job, std::int64_t offset, std::int64_t count,
                      const std::string& instruction_set) {
  const auto* gradient = static_cast<const std::byte*>(job.gradient) + offset * job.gradient_item_bytes();
  const auto sum = kernels_for(instruction_set).sum[static_cast<int>(format_of(job.from))];
  return sum(gradient, static_cast<std::size_t>(count));
}

void update_elements(const UpdateJob& job, std::int64_t offset, std::int64_t count, const UpdateScalars& scalars,
                     const std::string& instruction_set) {
  const UpdateKernels& kernels = kernels_for(instruction_set);
  const MasterFormat format = format_of(job.from);
  const bool in_place = job.in_place();
  const UpdateKernels::Update update =
      kernels.update[static_cast<int>(job.rule)][static_cast<int>(format)][in_place ? 0 : 1];
  const auto start = static_cast<std::size_t>(offset), total = static_cast<std::size_t>(count);
  const std::size_t gradient_size = format == MasterFormat::split ? sizeof(std::uint16_t) : sizeof(float);
  const auto* gradient = static_cast<const std::byte*>(job.gradient) + start * gradient_size;
  const UnitArrays from = at(job.from, start), to = at(job.to, start);
  const bool flushed = job.rule != UpdateRule::lion;
  if (scalars.factor == 1.0f) {
    const FlushDenormals flush(flushed);
    update(from, to, gradient, total, scalars);
  } else {
    alignas(64) std::array<float, kBlock> scaled;  // not initialised: every element is written before it is read
    for (std::size_t done = 0; done < total; done += kBlock) {
      const std::size_t size = std::min(kBlock, total - done);
      kernels.scale[static_cast<int>(format)](gradient + done * gradient_size, scaled.data(), size, scalars.factor);
      const FlushDenormals flush(flushed);
      update(at(from, done), at(to, done), scaled.data(), size, scalars);
    }
  }
  if (!in_place) end_stream();
}

}  // namespace noria
