#include "optim/update.h"

#include <algorithm>
#include <utility>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "base/errors.h"
#include "optim/flush_denormals.h"
#include "optim/moment_codes.h"
#include "optim/prefetch.h"
#include "optim/scaled_gradient.h"

namespace noria {
namespace {

static_assert(kUndoBlock <= ScaledGradient::kMost && kUndoBlock % kStateBlock == 0);

// Elements per task: 0.6 to 1.8 MiB of traffic. That is far more than the cost of a task, and far less than a unit.
constexpr std::int64_t kChunk = 64 * 1024;
static_assert(kChunk % kStateBlock == 0 && kChunk % kUndoBlock == 0);

#if defined(__aarch64__)
constexpr const char* kBaselineName = "neon";
#else
constexpr const char* kBaselineName = "baseline";
#endif

using NamedKernels = std::pair<std::string, const UpdateKernels*>;

std::vector<NamedKernels> find_kernels() {
  std::vector<NamedKernels> found{{kBaselineName, &kBaselineKernels}};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  if (avx2 && kAvx2Kernels.scale[0] != nullptr) found.emplace_back("avx2", &kAvx2Kernels);
  if (avx512 && kAvx512Kernels.scale[0] != nullptr) found.emplace_back("avx512", &kAvx512Kernels);
#elif defined(__aarch64__)
  const bool sve2 = (getauxval(AT_HWCAP2) & HWCAP2_SVE2) != 0;
  if (sve2 && kSve2Kernels.scale[0] != nullptr) found.emplace_back("sve2", &kSve2Kernels);
#endif
  return found;
}

const std::vector<NamedKernels>& all_kernels() {
  static const std::vector<NamedKernels> kernels = find_kernels();
  return kernels;
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
  constexpr auto kCodes = static_cast<std::int64_t>(kStateBlock);
  switch (format) {
  case StateFormat::fp32:
    return 4 * count;
  case StateFormat::bf16:
    return 2 * count;
  case StateFormat::eight_bit:
    return count + 4 * ((count + kCodes - 1) / kCodes);
  }
  return 0;
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

// A piece of a job on one instruction set. Ranges count as `UpdatePiece::offset` does.
class Elements {
 public:
  Elements(const UpdateJob& job, const UpdatePiece& piece, const UpdateKernels& kernels)
      : job_(job),
        piece_(piece),
        kernels_(kernels),
        format_(format_of(job.arrays)),
        way_(kernels.update[static_cast<int>(job.rule)][static_cast<int>(format_)]
                 .of[static_cast<int>(job.state_format())]),
        is_redo_(job.task == UpdateTask::redo && !have_same_bits(piece.scalars, piece.drafted)) {}

  void update(std::size_t begin, std::size_t end) const {
    while (begin < end) {
      // Little is scaled at once: the prefetches of `seen` cover a short loop.
      const std::size_t most = ScaledGradient::has_work(piece_.scalars) ? kStateBlock : end - begin;
      // A kernel counts in 32 bits.
      const std::size_t size = std::min({most, end - begin, before_carry(begin)});
      ScaledGradient scaled;
      const void* gradient = seen(piece_.scalars, begin, size, scaled);
      const FlushDenormals flush(is_flushed());
      way_.update(arrays(begin), gradient, size, piece_.scalars, first_random(piece_.scalars.rounding, number(begin)));
      begin += size;
    }
  }
  void draft(std::size_t begin, std::size_t end) const {
    const UndoBlock log = log_of(begin);
    if (before_carry(begin) < end - begin) {  // one block in 4 billion elements
      *log.begin = kLeftOut;
      std::atomic_ref(log.header->num_left).fetch_add(1, std::memory_order_relaxed);
      return;
    }
    ScaledGradient scaled;
    const void* gradient = seen(piece_.scalars, begin, end - begin, scaled);
    const FlushDenormals flush(is_flushed());
    way_.draft(arrays(begin), gradient, end - begin, piece_.scalars,
               first_random(piece_.scalars.rounding, number(begin)), log);
  }
  void undo(std::size_t begin, std::size_t end) const {
    const UndoBlock log = log_of(begin);
    if (*log.begin == kLeftOut) return;
    ScaledGradient scaled;
    const void* gradient = seen(piece_.drafted, begin, end - begin, scaled);
    const FlushDenormals flush(is_flushed());
    way_.undo(arrays(begin), gradient, end - begin, piece_.drafted, log);
  }
  void redo(std::size_t begin, std::size_t end) const {
    const bool is_left_out = *log_of(begin).begin == kLeftOut;
    if (is_redo_ && !is_left_out) undo(begin, end);
    if (is_redo_ || is_left_out) update(begin, end);
  }

 private:
  bool is_flushed() const { return job_.rule != UpdateRule::lion; }
  std::size_t inside(std::size_t at) const { return at - static_cast<std::size_t>(piece_.offset); }
  std::uint64_t number(std::size_t at) const { return piece_.first + inside(at); }
  /// Returns how many elements from `at` on have numbers with the same upper half.
  std::size_t before_carry(std::size_t at) const { return (std::uint64_t{1} << 32) - (number(at) & 0xffffffffu); }
  UnitArrays arrays(std::size_t at) const { return arrays_at(job_, piece_, static_cast<std::int64_t>(at)); }
  UndoBlock log_of(std::size_t at) const {
    const auto block = static_cast<std::size_t>(piece_.first_undo_block) + inside(at) / kUndoBlock;
    return {job_.log.bytes + at, job_.log.begins + block, job_.log.header, job_.log.slots, job_.log.num_slots};
  }
  /// Returns the gradient as the rule sees it.
  const void* seen(const UpdateScalars& scalars, std::size_t begin, std::size_t size, ScaledGradient& scaled) const {
    const std::byte* gradient = job_.gradient_at(piece_, begin);
    if (ScaledGradient::has_work(scalars)) {
      prefetch(arrays(begin), 0, kStateBlock / 2);
      const auto item_bytes = static_cast<std::size_t>(job_.gradient_item_bytes());
      prefetch(gradient, size * item_bytes, kStateBlock * item_bytes);
    }
    return scaled.seen(kernels_, format_, gradient, size, scalars);
  }

  const UpdateJob& job_;
  const UpdatePiece& piece_;
  const UpdateKernels& kernels_;
  const MasterFormat format_;
  const UpdateKernels::Way way_;
  const bool is_redo_;
};

}  // namespace

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

UnitArrays arrays_at(const UpdateJob& job, const UpdatePiece& piece, std::int64_t offset) {
  const auto inside = static_cast<std::size_t>(offset - piece.offset);
  const std::size_t block = static_cast<std::size_t>(piece.first_block) + inside / kStateBlock;
  return at(job.arrays, static_cast<std::size_t>(offset), block);
}

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

StateFormat UpdateJob::state_format() const { return format_of(arrays.m); }

Bytes UpdateJob::gradient_bytes() const {
  Bytes sum;
  for (const UpdatePiece& piece : pieces) sum += Bytes{piece.count * gradient_item_bytes()};
  return sum;
}

Bytes UpdateJob::bytes() const {
  if (task == UpdateTask::sum) return gradient_bytes();
  Bytes sum;
  const std::int64_t master_bytes = rule == UpdateRule::adafactor ? 12 + 2 * gradient_item_bytes() : 8;
  for (const UpdatePiece& piece : pieces) {
    sum += Bytes{master_bytes + gradient_item_bytes() + (has_log() ? 1 : 0)} * piece.count;
    sum += Bytes{2 * moment_bytes(state_format(), piece.count)} * num_moments(rule);
  }
  return sum;
}

void cut_into_chunks(const std::vector<UpdatePiece>& pieces, std::vector<UpdateChunk>& chunks) {
  chunks.clear();
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const UpdatePiece& piece = pieces[i];
    for (std::int64_t done = 0; done < piece.count; done += kChunk) {
      chunks.push_back({i, piece.offset + done, std::min(kChunk, piece.count - done)});
    }
  }
}

void check(const UpdateJob& job) {
  const int moments = num_moments(job.rule);
  const UnitArrays& arrays = job.arrays;
  const bool is_split = arrays.working != nullptr;
  NORIA_INVARIANT(is_split == (arrays.low != nullptr) && is_split == (arrays.master == nullptr),
                  "an update is of an fp32 master, or of a working copy with its low bits");
  NORIA_INVARIANT(num_arrays(arrays.m) == (moments > 0 ? 1 : 0) && num_arrays(arrays.v) == (moments > 1 ? 1 : 0),
                  "an update keeps the moments of its rule");
  for (const MomentArray* moment : {&arrays.m, &arrays.v}) {
    NORIA_INVARIANT(num_arrays(*moment) == 0 || format_of(*moment) == job.state_format(),
                    "the moments of an update have one format");
    NORIA_INVARIANT((moment->scales != nullptr) == (moment->codes != nullptr), "codes have scales");
  }
  const bool needs_log = job.task != UpdateTask::update && job.task != UpdateTask::sum;
  NORIA_INVARIANT(!needs_log || can_be_drafted(job.rule), "updates of this rule cannot be undone");
  NORIA_INVARIANT(job.rule != UpdateRule::muon || job.task == UpdateTask::sum || job.orthogonalize,
                  "muon needs matrix products");
  NORIA_INVARIANT(needs_log == job.has_log() && needs_log == (job.progress != nullptr),
                  "drafts have a log and a progress, other updates have none");
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  for (const UpdatePiece& piece : job.pieces) {
    NORIA_INVARIANT(piece.offset >= 0 && piece.count >= 0, "a piece of an update has no range");
    NORIA_INVARIANT(piece.count == 0 || job.gradient != nullptr || piece.gradient != nullptr,
                    "an update lacks its gradient");
    NORIA_INVARIANT(piece.num_late_scales <= kMostLateScales &&
                        (piece.num_late_scales < 1 || (piece.late_scales != nullptr && piece.scalars.prefactor == 1)) &&
                        (piece.num_late_scales < 2 || std::abs(piece.scalars.factor) == 1),
                    "an update has no place for what multiplies its gradient");
    NORIA_INVARIANT(job.state_format() != StateFormat::eight_bit || piece.first % kStateBlock == 0,
                    "a piece of an update cuts a block of codes");
    const FactoredMoments& shape = piece.factored;
    const bool needs_shape = !is_elementwise(job.rule) && job.task != UpdateTask::sum && piece.count > 0;
    NORIA_INVARIANT(!needs_shape || shape.num_matrices * shape.num_rows * shape.num_columns == piece.count,
                    "an update that is not elementwise knows rows and columns of each piece");
    NORIA_INVARIANT(!needs_shape || (job.rule == UpdateRule::adafactor) == (shape.by_column != nullptr),
                    "adafactor keeps moments of rows and columns");
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

void for_each_here(std::size_t count, const std::function<void(std::size_t)>& each) {
  for (std::size_t i = 0; i < count; ++i) each(i);
}

double sum_of_squares(const UpdateJob& job, const UpdatePiece& piece, std::int64_t offset, std::int64_t count,
                      const std::string& instruction_set) {
  const std::byte* gradient = job.gradient_at(piece, static_cast<std::size_t>(offset));
  const auto sum = kernels_for(instruction_set).sum[static_cast<int>(format_of(job.arrays))];
  return sum(gradient, static_cast<std::size_t>(count));
}

void make_draft(UpdateJob& update, const UndoLog& log) {
  update.task = UpdateTask::draft;
  update.log = log;
  update.progress = std::make_shared<DraftProgress>();
  std::int64_t next = 0;
  for (UpdatePiece& piece : update.pieces) {
    piece.first_undo_block = next;
    next += num_undo_blocks(piece.count);
  }
}

void begin_draft(const UpdateJob& draft) {
  *draft.log.header = {};
  draft.progress->has_begun = true;
}

UpdateJob undo_of(UpdateJob draft) {
  draft.task = UpdateTask::undo;
  draft.sums = nullptr;
  for (UpdatePiece& piece : draft.pieces) piece.drafted = piece.scalars;
  return draft;
}

void make_redo(UpdateJob& update, const UpdateJob& draft) {
  update.task = UpdateTask::redo;
  update.log = draft.log;
  update.progress = draft.progress;
  for (std::size_t i = 0; i < update.pieces.size(); ++i) {
    update.pieces[i].drafted = draft.pieces[i].scalars;
    update.pieces[i].first_undo_block = draft.pieces[i].first_undo_block;
  }
}

void update_elements(const UpdateJob& job, const UpdatePiece& piece, std::int64_t offset, std::int64_t count,
                     const std::string& instruction_set) {
  const Elements elements(job, piece, kernels_for(instruction_set));
  const auto begin = static_cast<std::size_t>(offset), end = begin + static_cast<std::size_t>(count);
  if (!job.has_log()) {
    elements.update(begin, end);
    return;
  }
  for (std::size_t at = begin; at < end; at += kUndoBlock) {
    const std::size_t until = std::min(at + kUndoBlock, end);
    if (job.task == UpdateTask::draft) elements.draft(at, until);
    else if (job.task == UpdateTask::undo) elements.undo(at, until);
    else elements.redo(at, until);
  }
}

}  // namespace noria
