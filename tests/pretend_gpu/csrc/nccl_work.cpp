#include "nccl_work.h"

#include <ATen/core/ivalue_inl.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

namespace pretend_gpu {
namespace {

bool waits_blocking() {
  const char* value = std::getenv("TORCH_NCCL_BLOCKING_WAIT");
  return value != nullptr && std::string(value) != "0";
}

}  // namespace

QueuedWork::QueuedWork(int rank, c10d::OpType type, cudaEvent_t event, int device,
                       std::shared_ptr<const Outcome> outcome, std::shared_ptr<Shelf> shelf,
                       std::vector<at::Tensor> results, std::uint64_t number)
    : c10d::Work(rank, type),
      event_(event),
      device_(device),
      outcome_(std::move(outcome)),
      shelf_(std::move(shelf)),
      results_(std::move(results)),
      number_(number),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{device_of(device)})) {
  future_->markCompleted(c10::IValue(results_));
}

QueuedWork::~QueuedWork() { cudaEventDestroy(event_); }

bool QueuedWork::wait(std::chrono::milliseconds) {
  if (opType_ != c10d::OpType::BARRIER && !waits_blocking()) {
    wait_event(event_, current_stream(device_));
    shelf_->clear();
    if (const std::exception_ptr error = outcome_->error()) std::rethrow_exception(error);
    return true;
  }
  const cudaError_t error = cudaEventSynchronize(event_);
  shelf_->clear();
  if (const std::exception_ptr failure = outcome_->error()) {
    forget_failure();  // it is told here
    std::rethrow_exception(failure);
  }
  check(error, "cudaEventSynchronize");
  return true;
}

CoalescedWork::CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> parts)
    : c10d::Work(rank, c10d::OpType::COALESCED),
      parts_(std::move(parts)) {}

bool CoalescedWork::isCompleted() {
  return std::ranges::all_of(parts_, [](const auto& each) { return each->isCompleted(); });
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& each : parts_) {
    if (const std::exception_ptr error = each->exception()) return error;
  }
  return nullptr;
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  for (const auto& each : parts_) each->wait(timeout);
  return true;
}

}  // namespace pretend_gpu
