#include "optim/device_optimizer.h"

#include <string>
#include <utility>

#include <tbb/task_arena.h>

#include "base/errors.h"
#include "optim/parallel.h"

namespace noria {
namespace {

void check_all(const std::vector<UpdateJob>& jobs, UpdateTask task) {
  for (const UpdateJob& job : jobs) {
    check(job);
    NORIA_INVARIANT(job.task == task && job.state_format() == StateFormat::fp32 && !job.has_late_scales(),
                    "the device updates moments in fp32, and sums");
  }
}

struct JobChunk {
  const UpdateJob* job;
  const UpdatePiece* piece;
  std::int64_t offset;
  std::int64_t count;
};

std::vector<JobChunk> chunks_of(const std::vector<UpdateJob>& jobs) {
  std::vector<JobChunk> chunks;
  std::vector<UpdateChunk> cut;
  for (const UpdateJob& job : jobs) {
    cut_into_chunks(job.pieces, cut);
    for (const UpdateChunk& chunk : cut) {
      chunks.push_back({&job, &job.pieces[chunk.piece], chunk.offset, chunk.count});
    }
  }
  return chunks;
}

class OnHost final : public DeviceOptimizer {
 public:
  void update(const std::vector<UpdateJob>& jobs, Stream /*stream*/) override {
    check_all(jobs, UpdateTask::update);
    const std::vector<JobChunk> chunks = chunks_of(jobs);
    for_each_number(arena_, chunks.size(), [&](std::size_t i) {
      update_elements(*chunks[i].job, *chunks[i].piece, chunks[i].offset, chunks[i].count);
    });
  }

  void sum(const std::vector<UpdateJob>& jobs, double* sums, Stream /*stream*/) override {
    check_all(jobs, UpdateTask::sum);
    const std::vector<JobChunk> chunks = chunks_of(jobs);
    for_each_number(arena_, chunks.size(), [&](std::size_t i) {
      sums[kSumSpan * i] = sum_of_squares(*chunks[i].job, *chunks[i].piece, chunks[i].offset, chunks[i].count);
    });
  }

 private:
  tbb::task_arena arena_;
};

// One launch for each piece.
class ByKernels final : public DeviceOptimizer {
 public:
  explicit ByKernels(std::shared_ptr<Backend> backend) : backend_(std::move(backend)) {}

  void update(const std::vector<UpdateJob>& jobs, Stream stream) override {
    check_all(jobs, UpdateTask::update);
    for (const UpdateJob& job : jobs) {
      const std::string name = "noria_update_" + std::string(to_string(job.rule)) + format_of(job);
      for (const UpdatePiece& piece : job.pieces) {
        UnitArrays arrays = arrays_at(job, piece, piece.offset);
        const void* gradient = job.gradient_at(piece, static_cast<std::size_t>(piece.offset));
        auto count = static_cast<std::size_t>(piece.count);
        UpdateScalars scalars = piece.scalars;
        backend_->launch(name, piece.count, {&arrays, static_cast<void*>(&gradient), &count, &scalars}, stream);
      }
    }
  }

  void sum(const std::vector<UpdateJob>& jobs, double* sums, Stream stream) override {
    check_all(jobs, UpdateTask::sum);
    std::vector<UpdateChunk> chunks;
    double* next = sums;
    for (const UpdateJob& job : jobs) {
      const std::string name = "noria_sum" + format_of(job);
      for (const UpdatePiece& piece : job.pieces) {
        cut_into_chunks({piece}, chunks);
        if (chunks.empty()) continue;
        const void* gradient = job.gradient_at(piece, static_cast<std::size_t>(piece.offset));
        auto count = static_cast<std::size_t>(piece.count), chunk = static_cast<std::size_t>(chunks.front().count);
        const auto num_sums = static_cast<std::int64_t>(kSumSpan * chunks.size());
        backend_->launch(name, num_sums, {static_cast<void*>(&gradient), &count, &chunk, static_cast<void*>(&next)},
                         stream);
        next += num_sums;
      }
    }
    auto num_chunks = static_cast<std::size_t>(next - sums) / kSumSpan;
    backend_->launch("noria_add_sums", static_cast<std::int64_t>(num_chunks), {static_cast<void*>(&sums), &num_chunks},
                     stream);
  }

 private:
  static std::string format_of(const UpdateJob& job) { return job.arrays.working != nullptr ? "_split" : "_whole"; }

  const std::shared_ptr<Backend> backend_;
};

}  // namespace

std::unique_ptr<DeviceOptimizer> make_device_optimizer(std::shared_ptr<Backend> backend) {
  if (backend->name() == "host") return std::make_unique<OnHost>();
  return std::make_unique<ByKernels>(std::move(backend));
}

}  // namespace noria
