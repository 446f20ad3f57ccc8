// A process group that stands for NCCL: it queues gloo's collectives on streams.
//
// Ownership: a group has a stream of its own for collectives, and for each peer one to send and one to receive on; the
//   tensors of a call are kept until its `wait`, or until the device has passed it.
// Order: a call waits for what the current stream has been given, runs behind the host's back, and its `wait` makes the
//   current stream wait, not the host (but for barriers, and with TORCH_NCCL_BLOCKING_WAIT). Ranks meet in the first
//   call, not when the group is made. Sends and receives of one pair are matched in order; tags are not looked at.
// Failures: a call that fails, or runs into the group's timeout, breaks the group. Who waits for it hears so, as does
//   who uses the group again, or next waits for the device, where NCCL's watchdog would end the process. After `abort`
//   the device goes on: only who waits for the call, or uses the group again, hears it.
// Threads: as torch's: calls in one order on all ranks. Streams do not wait for demand (fake_cuda/stream.h), because
//   another process may wait for them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "streams.h"

namespace pretend_gpu {

using Tensors = std::vector<at::Tensor>;

/// gloo, of the same ranks, for what runs on one stream after the other; see gloo.cpp.
class Gloo;
class Shelf;

class Nccl final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    Options();
    bool is_high_priority_stream = false;
  };

  /// `collectives`, `pairs`: gloo groups of the same ranks, which have not met yet.
  Nccl(int rank, int size, c10::intrusive_ptr<Options> options, c10::intrusive_ptr<c10d::Backend> collectives,
       c10::intrusive_ptr<c10d::Backend> pairs);
  ~Nccl() override;

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return num_calls_; }
  void enableCollectivesTiming() override {}
  c10d::ErrorType getError() override;

  using Work = c10::intrusive_ptr<c10d::Work>;
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Work allgather(std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& options) override;
  Work _allgather_base(at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& options) override;
  Work allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& options) override;
  Work gather(std::vector<Tensors>& to, Tensors& from, const c10d::GatherOptions& options) override;
  Work scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ScatterOptions& options) override;
  Work reduce_scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ReduceScatterOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& options) override;
  Work reduce_scatter_tensor_coalesced(Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<std::int64_t>& to_sizes,
                     std::vector<std::int64_t>& from_sizes, const c10d::AllToAllOptions& options) override;
  Work alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& options) override;
  Work send(Tensors& tensors, int peer, int tag) override;
  Work recv(Tensors& tensors, int peer, int tag) override;
  Work barrier(const c10d::BarrierOptions& options) override;

  void startCoalescing() override;
  Work endCoalescing() override;

  /// What is under way fails. It waits for nothing.
  void abort() override;
  /// Waits for what is under way.
  void shutdown() override;
  /// At the end of a process, where streams may wait for ranks that are gone.
  static void abort_all();

 private:
  struct Kept {
    cudaEvent_t event;
    std::shared_ptr<Shelf> shelf;
  };
  struct Pair {
    int peer;
    bool is_send;
    auto operator<=>(const Pair&) const = default;
  };
  /// With CPU copies of the tensors, in the same order.
  using Act = std::function<void(Gloo& gloo, Tensors& tensors)>;

  /// `results`: of the tensors, those that the call writes.
  Work queue(c10d::OpType type, const Tensors& tensors, const Tensors& results, const Act& act,
             std::optional<Pair> pair = std::nullopt, std::optional<int> device = std::nullopt);
  c10::Stream stream_for(std::optional<Pair> pair);
  int device_for(const Tensors& tensors, std::optional<int> device);
  void check_alive() const;
  void forget_passed();

  const c10::intrusive_ptr<Options> options_;
  const std::shared_ptr<Gloo> gloo_;  // of streams too, which may outlive the group
  std::uint64_t num_calls_ = 0;
  int device_ = -1;   // of the first call, and then of all
  std::mutex mutex_;  // protects all below
  std::map<std::optional<Pair>, cudaStream_t> streams_;
  std::vector<Kept> kept_;
  std::optional<std::vector<Work>> coalesced_;
};

}  // namespace pretend_gpu
