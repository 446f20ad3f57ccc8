#include "optim/factored.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/errors.h"
#include "optim/scaled_gradient.h"

namespace noria {
namespace {

// A kernel adds the squares of this many rows in one call. A band has at least this many.
constexpr std::int64_t kRows = 64;
constexpr std::int64_t kMostBands = 64;  // of a matrix
// A part has about this many elements; see kChunk in optim/update.cpp.
constexpr std::int64_t kPart = 64 * 1024;
constexpr auto kColumns = static_cast<std::int64_t>(kStretch);
static_assert(kStretch <= ScaledGradient::kMost);

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Returns a moment moved by `share` of the way to `mean`, from the nearer end as torch's lerp.
float moved(float moment, double mean, double share) {
  const double way = mean - moment;
  return static_cast<float>(share < 0.5 ? moment + share * way : mean - (1.0 - share) * way);
}

float inverse_root(double value) { return static_cast<float>(1.0 / std::sqrt(value)); }

// torch's `max(limit, value)` of numbers in Python: if the value is not a number, it is the limit.
double at_least(double limit, double value) { return value > limit ? value : limit; }

}  // namespace

// Describes how a parameter is cut. A band is a run of rows of one matrix. If the parameter is no matrix, it is a run
// of elements.
struct FactoredUpdate::Plan {
  const UpdatePiece* piece;
  std::int64_t band_rows, bands_per_matrix, num_bands;
  std::size_t row_at, column_at, band_at;  // where its numbers begin in the vectors of FactoredUpdate
  std::size_t first_part, num_parts;
  double rms = 0.0;   // of the parameter
  float step = 0.0f;  // by which its updates are multiplied

  bool is_matrix() const { return piece->factored.by_row != nullptr; }
  std::int64_t band_elements() const {
    return is_matrix() ? std::min(band_rows, piece->factored.num_rows) * piece->factored.num_columns : kColumns;
  }
};

struct FactoredUpdate::Part {
  std::size_t plan;
  std::int64_t first_band, num_bands;
  double squares = 0.0;  // of the parameter, later of its updates
};

// One run, on one instruction set.
class FactoredUpdate::Run {
 public:
  Run(FactoredUpdate& memory, const UpdateJob& job, const std::string& instruction_set)
      : its_(memory),
        job_(job),
        kernels_(kernels_for(instruction_set)),
        format_(job.arrays.working != nullptr ? MasterFormat::split : MasterFormat::whole),
        loops_(kernels_.factored[static_cast<int>(format_)]) {
    plan();
  }

  void measure(Part& part) const {
    const Plan& plan = its_.plans_[part.plan];
    part.squares = 0.0;
    for_each_band(part, [&](std::int64_t band) {
      part.squares += plan.is_matrix() ? measure_rows(plan, band) : measure_elements(plan, band);
    });
  }

  void factor(const Plan& plan) const {
    if (!plan.is_matrix()) return;
    for (std::int64_t matrix = 0; matrix < plan.piece->factored.num_matrices; ++matrix) {
      factor_rows(plan, matrix);
      factor_columns(plan, matrix);
    }
  }

  void sum_updates(Part& part) const {
    const Plan& plan = its_.plans_[part.plan];
    part.squares = 0.0;
    for_each_stretch(plan, part, [&](std::size_t at, std::size_t count, float by_row, const float* by_column) {
      ScaledGradient memory;
      part.squares += loops_.updates(gradient(plan, at, count, memory), count, by_row, by_column, most(plan));
    });
  }

  void apply(const Part& part) const {
    const Plan& plan = its_.plans_[part.plan];
    const float decay = plan.piece->scalars.decay;
    for_each_stretch(plan, part, [&](std::size_t at, std::size_t count, float by_row, const float* by_column) {
      ScaledGradient memory;
      loops_.apply(arrays(plan, at), gradient(plan, at, count, memory), count, by_row, by_column, most(plan), decay,
                   plan.step);
    });
  }

  /// Returns the root mean square of what the parts of a parameter have added up.
  double rms_of_parts(const Plan& plan) const {
    double sum = 0.0;
    for (std::size_t i = 0; i < plan.num_parts; ++i) sum += its_.parts_[plan.first_part + i].squares;
    return std::sqrt(sum / static_cast<double>(plan.piece->count));
  }

 private:
  void plan() {
    its_.plans_.clear();
    its_.parts_.clear();
    std::size_t rows = 0, columns = 0, band_sums = 0;
    for (const UpdatePiece& piece : job_.pieces) {
      if (piece.count == 0) continue;
      const FactoredMoments& shape = piece.factored;
      Plan plan{&piece, 1, 1, 1, rows, columns, band_sums, its_.parts_.size(), 0};
      if (plan.is_matrix()) {
        plan.band_rows = std::max(kRows, ceil_div(shape.num_rows, kMostBands));
        plan.bands_per_matrix = ceil_div(shape.num_rows, plan.band_rows);
        plan.num_bands = shape.num_matrices * plan.bands_per_matrix;
        rows += static_cast<std::size_t>(shape.num_matrices * shape.num_rows);
        columns += static_cast<std::size_t>(shape.num_matrices * shape.num_columns);
        band_sums += static_cast<std::size_t>(plan.num_bands * shape.num_columns);
      } else {
        plan.num_bands = ceil_div(piece.count, kColumns);
      }
      const std::int64_t per_part = std::max<std::int64_t>(1, kPart / plan.band_elements());
      for (std::int64_t band = 0; band < plan.num_bands; band += per_part) {
        its_.parts_.push_back({its_.plans_.size(), band, std::min(per_part, plan.num_bands - band)});
      }
      plan.num_parts = its_.parts_.size() - plan.first_part;
      its_.plans_.push_back(plan);
    }
    its_.by_row_.assign(rows, 0.0f);
    its_.by_column_.resize(columns);
    its_.band_sums_.assign(band_sums, 0.0f);
  }

  template <class Each>
  static void for_each_band(const Part& part, const Each& each) {
    for (std::int64_t i = 0; i < part.num_bands; ++i) each(part.first_band + i);
  }

  /// Calls `each(first column, count)`.
  template <class Each>
  static void for_each_run_of_columns(std::int64_t num_columns, const Each& each) {
    for (std::int64_t at = 0; at < num_columns; at += kColumns) each(at, std::min(kColumns, num_columns - at));
  }

  struct Rows {
    std::int64_t matrix, first, count;  // `first`: in the matrix
  };
  static Rows rows_of(const Plan& plan, std::int64_t band) {
    const std::int64_t first = band % plan.bands_per_matrix * plan.band_rows;
    return {band / plan.bands_per_matrix, first, std::min(plan.band_rows, plan.piece->factored.num_rows - first)};
  }

  /// Calls `each(first element, count, the row's factor, the columns' factors)`.
  template <class Each>
  void for_each_stretch(const Plan& plan, const Part& part, const Each& each) const {
    const FactoredMoments& shape = plan.piece->factored;
    for_each_band(part, [&](std::int64_t band) {
      if (!plan.is_matrix()) {
        alignas(64) std::array<float, kStretch> roots;  // NOLINT(cppcoreguidelines-pro-type-member-init)
        const std::int64_t at = band * kColumns;
        const auto count = static_cast<std::size_t>(std::min(kColumns, plan.piece->count - at));
        kernels_.inverse_roots(shape.by_column + at, count, roots.data());
        each(static_cast<std::size_t>(at), count, 1.0f, roots.data());
        return;
      }
      const Rows rows = rows_of(plan, band);
      for (std::int64_t row = 0; row < rows.count; ++row) {
        const std::int64_t number = rows.matrix * shape.num_rows + rows.first + row;
        const float* by_column = its_.by_column_.data() + plan.column_at + rows.matrix * shape.num_columns;
        for_each_run_of_columns(shape.num_columns, [&](std::int64_t column, std::int64_t count) {
          each(static_cast<std::size_t>(number * shape.num_columns + column), static_cast<std::size_t>(count),
               its_.by_row_[plan.row_at + static_cast<std::size_t>(number)], by_column + column);
        });
      }
    });
  }

  double measure_elements(const Plan& plan, std::int64_t band) const {
    const std::int64_t at = band * kColumns;
    const auto count = static_cast<std::size_t>(std::min(kColumns, plan.piece->count - at));
    const auto first = static_cast<std::size_t>(at);
    ScaledGradient memory;
    return loops_
        .moments(arrays(plan, first), gradient(plan, first, count, memory), count, plan.piece->scalars.one_minus_beta2,
                 plan.piece->factored.by_column + at)
        .of_parameter;
  }

  double measure_rows(const Plan& plan, std::int64_t band) const {
    const FactoredMoments& shape = plan.piece->factored;
    const Rows rows = rows_of(plan, band);
    float* by_row = its_.by_row_.data() + plan.row_at + rows.matrix * shape.num_rows + rows.first;
    float* sums = its_.band_sums_.data() + plan.band_at + band * shape.num_columns;
    double squares = 0.0;
    for_each_run_of_columns(shape.num_columns, [&](std::int64_t column, std::int64_t count) {
      for (std::int64_t first = 0; first < rows.count; first += kRows) {
        alignas(64) std::array<float, kStretch> by_column;  // NOLINT(cppcoreguidelines-pro-type-member-init)
        std::fill_n(by_column.begin(), count, 0.0f);
        for (std::int64_t row = first; row < std::min(first + kRows, rows.count); ++row) {
          const std::int64_t number = rows.matrix * shape.num_rows + rows.first + row;
          const auto at = static_cast<std::size_t>(number * shape.num_columns + column);
          ScaledGradient memory;
          const UpdateKernels::Squares found =
              loops_.squares(arrays(plan, at), gradient(plan, at, static_cast<std::size_t>(count), memory),
                             static_cast<std::size_t>(count), by_column.data());
          by_row[row] = static_cast<float>(by_row[row] + found.of_gradient);
          squares += found.of_parameter;
        }
        for (std::int64_t i = 0; i < count; ++i) sums[column + i] += by_column[static_cast<std::size_t>(i)];
      }
    });
    return squares;
  }

  /// Moves the moments of the rows. Turns the rows' sums into factors.
  void factor_rows(const Plan& plan, std::int64_t matrix) const {
    const FactoredMoments& shape = plan.piece->factored;
    const UpdateScalars& scalars = plan.piece->scalars;
    float* sums = its_.by_row_.data() + plan.row_at + matrix * shape.num_rows;
    float* moments = shape.by_row + matrix * shape.num_rows;
    double total = 0.0;
    for (std::int64_t row = 0; row < shape.num_rows; ++row) {
      moments[row] = moved(moments[row], sums[row] / static_cast<double>(shape.num_columns), scalars.one_minus_beta2);
      total += moments[row];
    }
    const double mean = total / static_cast<double>(shape.num_rows), least = scalars.eps;
    const double divisor = mean < least ? least : mean;
    for (std::int64_t row = 0; row < shape.num_rows; ++row) sums[row] = inverse_root(moments[row] / divisor);
  }

  void factor_columns(const Plan& plan, std::int64_t matrix) const {
    const FactoredMoments& shape = plan.piece->factored;
    float* moments = shape.by_column + matrix * shape.num_columns;
    float* factors = its_.by_column_.data() + plan.column_at + matrix * shape.num_columns;
    for_each_run_of_columns(shape.num_columns, [&](std::int64_t column, std::int64_t count) {
      std::array<double, kStretch> totals;  // NOLINT(cppcoreguidelines-pro-type-member-init)
      std::fill_n(totals.begin(), count, 0.0);
      for (std::int64_t i = 0; i < plan.bands_per_matrix; ++i) {
        const std::int64_t band = matrix * plan.bands_per_matrix + i;
        const float* sums = its_.band_sums_.data() + plan.band_at + band * shape.num_columns + column;
        for (std::int64_t j = 0; j < count; ++j) totals[static_cast<std::size_t>(j)] += sums[j];
      }
      for (std::int64_t j = 0; j < count; ++j) {
        const double mean = totals[static_cast<std::size_t>(j)] / static_cast<double>(shape.num_rows);
        float& moment = moments[column + j];
        moment = moved(moment, mean, plan.piece->scalars.one_minus_beta2);
        factors[column + j] = inverse_root(moment);
      }
    });
  }

  float most(const Plan& plan) const { return 1.0f / plan.piece->scalars.eps; }
  UnitArrays arrays(const Plan& plan, std::size_t at) const {
    return arrays_at(job_, *plan.piece, plan.piece->offset + static_cast<std::int64_t>(at));
  }
  const void* gradient(const Plan& plan, std::size_t at, std::size_t count, ScaledGradient& memory) const {
    const void* given = job_.gradient_at(*plan.piece, static_cast<std::size_t>(plan.piece->offset) + at);
    return memory.seen(kernels_, format_, given, count, plan.piece->scalars);
  }

  FactoredUpdate& its_;
  const UpdateJob& job_;
  const UpdateKernels& kernels_;
  const MasterFormat format_;
  const UpdateKernels::Factored& loops_;
};

FactoredUpdate::FactoredUpdate() = default;
FactoredUpdate::~FactoredUpdate() = default;

void FactoredUpdate::run(const UpdateJob& job, const ForEach& for_each, const std::function<void()>& part_done,
                         const std::string& instruction_set) {
  NORIA_INVARIANT(job.rule == UpdateRule::adafactor && job.task == UpdateTask::update,
                  "only updates of adafactor are factored");
  const Run run(*this, job, instruction_set);
  for_each(parts_.size(), [&](std::size_t i) { run.measure(parts_[i]); });
  for (Plan& plan : plans_) plan.rms = run.rms_of_parts(plan);
  for_each(plans_.size(), [&](std::size_t i) { run.factor(plans_[i]); });
  for_each(parts_.size(), [&](std::size_t i) { run.sum_updates(parts_[i]); });
  for (Plan& plan : plans_) {
    const UpdateScalars& scalars = plan.piece->scalars;
    const double clipped = at_least(1.0, run.rms_of_parts(plan) / scalars.most_rms);
    plan.step = static_cast<float>(at_least(scalars.least_rms, plan.rms) * scalars.negative_step / clipped);
  }
  for_each(parts_.size(), [&](std::size_t i) {
    run.apply(parts_[i]);
    part_done();
  });
}

}  // namespace noria
