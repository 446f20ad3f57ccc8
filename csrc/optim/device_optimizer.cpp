#include "optim/device_optimizer.h"

#include <tbb/task_arena.h>

#include "optim/parallel.h"

namespace noria {
namespace {

class HostDeviceOptimizer final : public DeviceOptimizer {
 public:
  void update(const std::vector<UpdateJob>& jobs) override {
    for (const UpdateJob& job : jobs) check(job);
    for_each_chunk(jobs, [&](const JobChunk& chunk, std::size_t) {
      const UpdateJob& job = jobs[chunk.job];
      update_elements(job, job.pieces[chunk.piece], chunk.offset, chunk.count);
    });
  }

  std::vector<std::vector<double>> sums(const std::vector<UpdateJob>& jobs) override {
    for (const UpdateJob& job : jobs) check(job);
    std::vector<double> by_chunk;
    const std::vector<JobChunk> chunks = for_each_chunk(
        jobs,
        [&](const JobChunk& chunk, std::size_t index) {
          const UpdateJob& job = jobs[chunk.job];
          by_chunk[index] = sum_of_squares(job, job.pieces[chunk.piece], chunk.offset, chunk.count);
        },
        &by_chunk);
    std::vector<std::vector<double>> sums;
    for (const UpdateJob& job : jobs) sums.emplace_back(job.pieces.size(), 0.0);
    for (std::size_t i = 0; i < chunks.size(); ++i) sums[chunks[i].job][chunks[i].piece] += by_chunk[i];
    return sums;
  }

 private:
  struct JobChunk {
    std::size_t job;
    std::size_t piece;
    std::int64_t offset;
    std::int64_t count;
  };

  template <class Body>
  std::vector<JobChunk> for_each_chunk(const std::vector<UpdateJob>& jobs, const Body& body,
                                       std::vector<double>* sums = nullptr) {
    std::vector<JobChunk> chunks;
    std::vector<UpdateChunk> cut;
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      cut_into_chunks(jobs[i].pieces, cut);
      for (const UpdateChunk& chunk : cut) chunks.push_back({i, chunk.piece, chunk.offset, chunk.count});
    }
    if (sums != nullptr) sums->assign(chunks.size(), 0.0);
    for_each_number(arena_, chunks.size(), [&](std::size_t i) { body(chunks[i], i); });
    return chunks;
  }

  tbb::task_arena arena_;
};

}  // namespace

std::unique_ptr<DeviceOptimizer> make_host_device_optimizer() { return std::make_unique<HostDeviceOptimizer>(); }

}  // namespace noria
