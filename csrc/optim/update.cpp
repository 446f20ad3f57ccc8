#include "optim/update.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/errors.h"
#include "optim/flush_denormals.h"
#include "optim/moment_codes.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace noria {
namespace {

// How many elements of a gradient are multiplied at once: they stay in the first cache until the rule has read them.
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

StateFormat format_of(const MomentArray& moment) {
  if (moment.codes != nullptr) return StateFormat::eight_bit;
  return moment.bf16 != nullptr ? StateFormat::bf16 : StateFormat::fp32;
}

int num_arrays(const MomentArray& moment) {
  return (moment.fp32 != nullptr) + (moment.bf16 != nullptr) + (moment.codes != nullptr);
}

// Returns the bytes of `count` elements of a moment, which begin with a block.
std::int64_t moment_bytes(StateFormat format, std::int64_t count) {
  constexpr auto kBlock = static_cast<std::int64_t>(kStateBlock);
  switch (format) {
  case StateFormat::fp32:
    return 4 * count;
  case StateFormat::bf16:
    return 2 * count;
  case StateFormat::eight_bit:
    return count + 4 * ((count + kBlock - 1) / kBlock);
  }
  return 0;
}

bool same(const UnitArrays& a, const UnitArrays& b) {
  return a.master == b.master && a.working == b.working && a.low == b.low && a.m == b.m && a.v == b.v;
}

bool share_an_array(const MomentArray& a, const MomentArray& b) {
  const auto is_shared = [](const auto* x, const auto* y) { return x != nullptr && x == y; };
  return is_shared(a.fp32, b.fp32) || is_shared(a.bf16, b.bf16) || is_shared(a.codes, b.codes) ||
         is_shared(a.scales, b.scales);
}

template <class Element>
Element* at(Element* array, std::size_t offset) {
  return array != nullptr ? array + offset : nullptr;
}

MomentArray at(const MomentArray& moment, std::size_t offset, std::size_t block) {
  return {at(moment.fp32, offset), at(moment.bf16, offset), at(moment.codes, offset), at(moment.scales, block)};
}

UnitArrays at(const UnitArrays& arrays, std::size_t offset, std::size_t block) {
  return {at(arrays.master, offset), at(arrays.working, offset), at(arrays.low, offset), at(arrays.m, offset, block),
          at(arrays.v, offset, block)};
}

// The upper half of an element's number goes into the key. The kernel counts the lower half.
Rounding rounding_of(const UpdateScalars& scalars, std::uint64_t number) {
  return {scalars.rounding ^ random_bits_of(static_cast<std::uint32_t>(number >> 32)),
          static_cast<std::uint32_t>(number)};
}

// Nothing else orders streaming stores, not even the release of a mutex.
void end_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace

bool UpdateJob::in_place() const { return same(from, to); }

bool UpdateJob::has_late_scales() const {
  return std::any_of(pieces.begin(), pieces.end(), [](const UpdatePiece& piece) { return piece.num_late_scales > 0; });
}

bool take_up_late_scales(UpdateJob& job) {
  bool is_changed = false;
  for (UpdatePiece& piece : job.pieces) {
    float* const where[kMostLateScales] = {&piece.scalars.prefactor, &piece.scalars.factor};
    for (int i = 0; i < piece.num_late_scales; ++i) {
      is_changed = is_changed || piece.late_scales[i] != 1.0f;
      *where[i] *= piece.late_scales[i];
    }
    piece.num_late_scales = 0;
  }
  return is_changed;
}

StateFormat UpdateJob::state_format() const { return format_of(from.m); }

Bytes UpdateJob::gradient_bytes() const {
  Bytes sum;
  for (const UpdatePiece& piece : pieces) sum += Bytes{piece.count * gradient_item_bytes()};
  return sum;
}

Bytes UpdateJob::bytes() const {
  if (task == UpdateTask::sum) return gradient_bytes();
  Bytes sum;
  for (const UpdatePiece& piece : pieces) {
    sum += Bytes{8 + gradient_item_bytes()} * piece.count;
    sum += Bytes{2 * moment_bytes(state_format(), piece.count)} * num_moments(rule);
  }
  return sum;
}

void check(const UpdateJob& job) {
  const int moments = num_moments(job.rule);
  for (const UnitArrays* arrays : {&job.from, &job.to}) {
    const bool split = arrays->working != nullptr;
    NORIA_INVARIANT(split == (arrays->low != nullptr) && split == (arrays->master == nullptr),
                    "an update is of an fp32 master, or of a working copy with its low bits");
    NORIA_INVARIANT(num_arrays(arrays->m) == (moments > 0 ? 1 : 0) && num_arrays(arrays->v) == (moments > 1 ? 1 : 0),
                    "an update has as many moments as its rule keeps");
    for (const MomentArray* moment : {&arrays->m, &arrays->v}) {
      NORIA_INVARIANT(num_arrays(*moment) == 0 || format_of(*moment) == job.state_format(),
                      "the moments of an update have one format");
      NORIA_INVARIANT((moment->scales != nullptr) == (moment->codes != nullptr), "codes have scales");
    }
  }
  NORIA_INVARIANT(job.gradient != nullptr, "an update lacks its gradient");
  NORIA_INVARIANT(format_of(job.from) == format_of(job.to), "an update changes the format of its master");
  const bool apart = job.from.master != job.to.master || job.from.working != job.to.working;
  NORIA_INVARIANT(job.in_place() || (apart && (job.from.low == nullptr || job.from.low != job.to.low) &&
                                     !share_an_array(job.from.m, job.to.m) && !share_an_array(job.from.v, job.to.v)),
                  "an update is in place, or shares no array with what it reads");
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  for (const UpdatePiece& piece : job.pieces) {
    NORIA_INVARIANT(piece.offset >= 0 && piece.count >= 0, "a piece of an update has no range");
    NORIA_INVARIANT(piece.num_late_scales <= kMostLateScales &&
                        (piece.num_late_scales < 1 || (piece.late_scales != nullptr && piece.scalars.prefactor == 1)) &&
                        (piece.num_late_scales < 2 || std::abs(piece.scalars.factor) == 1),
                    "an update has no place for what multiplies its gradient");
    NORIA_INVARIANT(job.state_format() != StateFormat::eight_bit || piece.first % kStateBlock == 0,
                    "a piece of an update cuts a block of codes");
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

void update_elements(const UpdateJob& job, const UpdatePiece& piece, std::int64_t offset, std::int64_t count,
                     const std::string& instruction_set) {
  const UpdateKernels& kernels = kernels_for(instruction_set);
  const MasterFormat format = format_of(job.from);
  const bool in_place = job.in_place();
  const UpdateKernels::Update update = kernels.update[static_cast<int>(job.rule)][static_cast<int>(format)]
                                           .of[static_cast<int>(job.state_format())][in_place ? 0 : 1];
  const auto start = static_cast<std::size_t>(offset), total = static_cast<std::size_t>(count);
  const auto inside = static_cast<std::size_t>(offset - piece.offset);
  const auto first_scale = static_cast<std::size_t>(piece.first_block) + inside / kStateBlock;
  const std::size_t gradient_size = format == MasterFormat::split ? sizeof(std::uint16_t) : sizeof(float);
  const auto* gradient = static_cast<const std::byte*>(job.gradient) + start * gradient_size;
  const UpdateScalars& scalars = piece.scalars;
  const bool flushed = job.rule != UpdateRule::lion;
  alignas(64) std::array<float, kBlock> scaled;  // not initialised: every element is written before it is read
  std::size_t done = 0;
  while (done < total) {
    // A kernel counts in 32 bits.
    const std::uint64_t number = piece.first + inside + done;
    std::size_t size = std::min<std::uint64_t>(total - done, (std::uint64_t{1} << 32) - (number & 0xffffffffu));
    const void* seen = gradient + done * gradient_size;
    const auto change = [&](UpdateKernels::Scale by, float factor) {
      if (factor == 1.0f) return;
      size = std::min(kBlock, size);
      by(seen, scaled.data(), size, factor);
      seen = scaled.data();
    };
    change(kernels.divide[static_cast<int>(format)], scalars.divisor);
    change(kernels.scale[static_cast<int>(format)], scalars.prefactor);
    change(kernels.scale[static_cast<int>(format)], scalars.factor);
    const FlushDenormals flush(flushed);
    update(at(job.from, start + done, first_scale + done / kStateBlock),
           at(job.to, start + done, first_scale + done / kStateBlock), seen, size, scalars,
           rounding_of(scalars, number));
    done += size;
  }
  if (!in_place) end_stream();
}

}  // namespace noria
