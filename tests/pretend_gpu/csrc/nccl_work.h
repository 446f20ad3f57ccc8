// What a call of the pretend GPU's NCCL returns.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "streams.h"

namespace pretend_gpu {

/// What became of a call, told by its stream.
class Outcome {
 public:
  void fail(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
  }
  std::exception_ptr error() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }

 private:
  mutable std::mutex mutex_;
  std::exception_ptr error_;
};

/// Keeps the tensors of a call until it is waited for, as torch's TensorShelf; or until the device has passed it.
class Shelf {
 public:
  explicit Shelf(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}
  void clear() {
    std::vector<at::Tensor> dropped;  // under no lock
    const std::lock_guard lock(mutex_);
    dropped.swap(tensors_);
  }

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> tensors_;
};

class QueuedWork final : public c10d::Work {
 public:
  /// The call's stream must be current: what follows the future waits for it. Takes the event over.
  QueuedWork(int rank, c10d::OpType type, cudaEvent_t event, int device, std::shared_ptr<const Outcome> outcome,
             std::shared_ptr<Shelf> shelf, std::vector<at::Tensor> results, std::uint64_t number);
  ~QueuedWork() override;

  bool isCompleted() override { return has_passed(event_); }
  bool isSuccess() const override { return outcome_->error() == nullptr; }
  std::exception_ptr exception() const override { return outcome_->error(); }
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::uint64_t getSequencenumber() const override { return number_; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  cudaEvent_t const event_;
  const int device_;
  const std::shared_ptr<const Outcome> outcome_;
  const std::shared_ptr<Shelf> shelf_;
  const std::vector<at::Tensor> results_;
  const std::uint64_t number_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// Several calls that were made as one.
class CoalescedWork final : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> parts);

  bool isCompleted() override;
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return parts_.back()->getFuture(); }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
};

}  // namespace pretend_gpu
