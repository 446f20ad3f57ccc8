#include "nccl.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue_inl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <set>
#include <utility>

#include "settings.h"

namespace pretend_gpu {

using c10d::OpType;
using RedOp = c10d::ReduceOp::RedOpType;

/// What streams know of a group, which may be gone before they are done.
struct Nccl::Shared {
  int rank, size;
  c10::intrusive_ptr<c10d::Backend> collectives, pairs;
  std::atomic<std::int64_t> timeout_ms;
  std::atomic<bool> is_aborted{false};
  std::mutex mutex;
  std::string failure;  // the first one

  std::string told() {
    const std::lock_guard lock(mutex);
    return failure;
  }
};

namespace {

/// The groups that are there.
struct Groups {
  std::mutex mutex;
  std::set<Nccl*> all;
};

Groups& groups() {
  static Groups* the_groups = new Groups;
  return *the_groups;
}

constexpr auto kDefaultTimeout = std::chrono::minutes(10);  // NCCL's in torch

bool waits_blocking() {
  const char* value = std::getenv("TORCH_NCCL_BLOCKING_WAIT");
  return value != nullptr && std::string(value) != "0";
}

/// What became of one call.
struct Outcome {
  std::mutex mutex;
  std::exception_ptr error;

  std::exception_ptr told() {
    const std::lock_guard lock(mutex);
    return error;
  }
};

class QueuedWork final : public c10d::Work {
 public:
  QueuedWork(int rank, OpType type, cudaEvent_t event, int device, std::shared_ptr<Outcome> outcome, Tensors results,
             std::uint64_t number)
      : c10d::Work(rank, type),
        event_(event),
        device_(device),
        outcome_(std::move(outcome)),
        results_(std::move(results)),
        number_(number),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<c10::Device>{device_of(device)})) {}
  ~QueuedWork() override { cudaEventDestroy(event_); }

  /// The stream of the call must be current: what follows the future waits for it.
  void complete_future() { future_->markCompleted(c10::IValue(results_)); }

  bool isCompleted() override { return has_passed(event_); }
  bool isSuccess() const override { return outcome_->told() == nullptr; }
  std::exception_ptr exception() const override { return outcome_->told(); }
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::uint64_t getSequencenumber() const override { return number_; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds) override {
    if (opType_ == OpType::BARRIER || waits_blocking()) {
      const cudaError_t error = cudaEventSynchronize(event_);
      if (const std::exception_ptr failure = outcome_->told()) {
        forget_failure();  // it is told here
        std::rethrow_exception(failure);
      }
      check(error, "cudaEventSynchronize");
    } else {
      wait_event(event_, current_stream(device_));
      if (const std::exception_ptr failure = outcome_->told()) std::rethrow_exception(failure);
    }
    return true;
  }

 private:
  cudaEvent_t const event_;
  const int device_;
  const std::shared_ptr<Outcome> outcome_;
  const Tensors results_;
  const std::uint64_t number_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class CoalescedWork final : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<Nccl::Work> parts)
      : c10d::Work(rank, OpType::COALESCED),
        parts_(std::move(parts)) {}

  bool isCompleted() override {
    return std::ranges::all_of(parts_, [](const Nccl::Work& each) { return each->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::ranges::all_of(parts_, [](const Nccl::Work& each) { return each->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const Nccl::Work& each : parts_) {
      if (const std::exception_ptr error = each->exception()) return error;
    }
    return nullptr;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return parts_.back()->getFuture(); }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const Nccl::Work& each : parts_) each->wait(timeout);
    return true;
  }

 private:
  const std::vector<Nccl::Work> parts_;
};

at::Tensor flat(const at::Tensor& tensor) { return tensor.view({-1}); }

/// NCCL has no booleans, and takes bytes instead: any for sums, all for products.
struct Reduction {
  RedOp op;
  bool as_bytes = false;

  Reduction(const c10d::ReduceOp& wanted, const at::Tensor& tensor) : op(wanted.op_) {
    TORCH_CHECK(op != RedOp::PREMUL_SUM, "the pretend GPU's NCCL has no PREMUL_SUM");
    if (tensor.scalar_type() != at::kBool) return;
    as_bytes = true;
    if (op == RedOp::SUM || op == RedOp::BOR) op = RedOp::MAX;
    if (op == RedOp::PRODUCT || op == RedOp::BAND) op = RedOp::MIN;
    TORCH_CHECK(op == RedOp::MAX || op == RedOp::MIN, "Cannot use this ReduceOp with Boolean inputs");
  }
  at::Tensor of(const at::Tensor& tensor) const { return as_bytes ? tensor.view(at::kByte) : tensor; }
};

Tensors joined(const Tensors& first, const Tensors& second) {
  Tensors all = first;
  all.insert(all.end(), second.begin(), second.end());
  return all;
}

Tensors range(const Tensors& tensors, std::size_t first, std::size_t count) {
  const auto begin = tensors.begin() + static_cast<std::ptrdiff_t>(first);
  return {begin, begin + static_cast<std::ptrdiff_t>(count)};
}

at::Tensor& only(Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "Expecting one tensor only but got multiple");
  return tensors[0];
}

}  // namespace

Nccl::Options::Options() : c10d::Backend::Options("nccl", kDefaultTimeout) {}

Nccl::Nccl(int rank, int size, c10::intrusive_ptr<Options> options, c10::intrusive_ptr<c10d::Backend> collectives,
           c10::intrusive_ptr<c10d::Backend> pairs)
    : c10d::Backend(rank, size),
      options_(std::move(options)),
      shared_(std::make_shared<Shared>()) {
  shared_->rank = rank;
  shared_->size = size;
  shared_->collectives = std::move(collectives);
  shared_->pairs = std::move(pairs);
  shared_->timeout_ms = options_->timeout.count();
  const std::lock_guard lock(groups().mutex);
  groups().all.insert(this);
}

Nccl::~Nccl() {
  {
    const std::lock_guard lock(groups().mutex);
    groups().all.erase(this);
  }
  for (const auto& [pair, stream] : streams_) cudaStreamDestroy(stream);
  for (const Kept& each : kept_) cudaEventDestroy(each.event);
}

void Nccl::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  shared_->timeout_ms = timeout.count();
  shared_->collectives->setTimeout(timeout);
  shared_->pairs->setTimeout(timeout);
}

c10d::ErrorType Nccl::getError() {
  return shared_->told().empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
}

// ---- one call ----

void Nccl::check_alive() const {
  const std::string failure = shared_->told();
  if (failure.empty() && !shared_->is_aborted) return;
  TORCH_CHECK_WITH(DistBackendError, false, "NCCL communicator was aborted on rank ", rank_, ". ",
                   failure.empty() ? "" : "Original reason for failure was: ", failure);
}

int Nccl::device_for(const Tensors& tensors, std::optional<int> device) {
  for (const at::Tensor& each : tensors) {
    TORCH_CHECK_WITH(ValueError, each.is_cuda() && !each.is_sparse(), "Tensors must be CUDA and dense");
    TORCH_CHECK_WITH(ValueError, each.is_contiguous(each.suggest_memory_format()), "Tensors must be contiguous");
    TORCH_CHECK_WITH(ValueError, !device || *device == each.device().index(), "Tensors must be on one device");
    device = each.device().index();
  }
  const int found = device.value_or(current_device());
  TORCH_CHECK(device_ < 0 || device_ == found,
              "a group of the pretend GPU's NCCL stays on the device of its first call, ", "cuda:", device_,
              "; found cuda:", found);
  return device_ = found;
}

cudaStream_t Nccl::stream_for(std::optional<std::pair<int, bool>> pair) {
  cudaStream_t& stream = streams_[pair.value_or(std::pair(-1, false))];
  if (stream == nullptr) {
    const OnDevice on(device_);
    stream = fake_cuda::make_stream(/*is_patient=*/true);
  }
  return stream;
}

/// The tensors of calls that the device has passed are let go.
void Nccl::forget_passed() {
  std::erase_if(kept_, [](const Kept& each) {
    if (cudaEventQuery(each.event) == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    cudaEventDestroy(each.event);
    return true;
  });
}

Nccl::Work Nccl::queue(OpType type, const Tensors& tensors, const Tensors& results, const Act& act,
                       std::optional<std::pair<int, bool>> pair, std::optional<int> device) {
  const std::lock_guard lock(mutex_);
  check_alive();
  const int on_device = device_for(tensors, device);
  const c10::Stream stream = external_stream(reinterpret_cast<std::uintptr_t>(stream_for(pair)), on_device);
  forget_passed();

  // NCCL is given pointers that are not const, whatever it does with them.
  std::vector<Operand> operands;
  static const std::string name = "nccl";
  for (const at::Tensor& each : tensors) {
    operands.push_back(operand_of(each, Access::write));
    check_reachable(operands.back(), on_device, name);
  }
  const Kept ready{make_event(on_device), {}};
  record_event(ready.event, current_stream(on_device));
  wait_event(ready.event, stream);
  cudaEventDestroy(ready.event);

  auto outcome = std::make_shared<Outcome>();
  static const std::map<OpType, std::string> names = [] {
    std::map<OpType, std::string> made;
    for (int each = 0; each <= static_cast<int>(OpType::REDUCE_SCATTER_TENSOR_COALESCED); ++each) {
      made[static_cast<OpType>(each)] = "nccl " + c10d::opTypeToString(static_cast<OpType>(each));
    }
    return made;
  }();
  launch_on(stream, names.at(type), [shared = shared_, outcome, act, type, operands = std::move(operands), pair] {
    const auto begun = std::chrono::steady_clock::now();
    try {
      TORCH_CHECK(!shared->is_aborted && shared->told().empty(), "the communicator was aborted before this call ran");
      const at::AutoDispatchBelowADInplaceOrView no_autograd;
      Aliases aliases;
      Tensors here;
      for (const Operand& each : operands) here.push_back(aliases.of(each));
      act(pair ? *shared->pairs : *shared->collectives, here);
    } catch (const std::exception& error) {
      const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begun);
      const std::string text =
          c10::str("[Rank ", shared->rank, "] ",
                   ms.count() >= shared->timeout_ms ? "Watchdog caught collective operation timeout: " : "NCCL error: ",
                   "WorkNCCL(OpType=", c10d::opTypeToString(type), ", Timeout(ms)=", shared->timeout_ms.load(),
                   ") ran for ", ms.count(), " milliseconds and failed: ", reason_of(error));
      {
        const std::lock_guard failing(outcome->mutex);
        outcome->error = std::make_exception_ptr(
            c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, text));
      }
      {
        const std::lock_guard failing(shared->mutex);
        if (shared->failure.empty()) shared->failure = text;
      }
      if (!shared->is_aborted) record_failure(text, cudaErrorUnknown);
    }
  });
  cudaEvent_t over = make_event(on_device);
  record_event(over, stream);
  cudaEvent_t kept = make_event(on_device);
  record_event(kept, stream);
  kept_.push_back({kept, tensors});
  auto work = c10::make_intrusive<QueuedWork>(rank_, type, over, on_device, outcome, results, ++num_calls_);
  {
    const c10::StreamGuard guard(stream);
    work->complete_future();
  }
  if (coalesced_) coalesced_->push_back(work);
  return work;
}

// ---- the calls ----

Nccl::Work Nccl::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  only(tensors);
  return queue(OpType::BROADCAST, tensors, tensors,
               [options](c10d::Backend& gloo, Tensors& here) { gloo.broadcast(here, options)->wait(); });
}

Nccl::Work Nccl::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const Reduction reduction(options.reduceOp, only(tensors));
  return queue(OpType::ALLREDUCE, tensors, tensors, [options, reduction](c10d::Backend& gloo, Tensors& here) {
    Tensors own{reduction.of(here[0])};
    c10d::AllreduceOptions its = options;
    its.reduceOp = reduction.op;
    gloo.allreduce(own, its)->wait();
  });
}

Nccl::Work Nccl::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const Reduction reduction(options.reduceOp, tensors.at(0));
  return queue(OpType::ALLREDUCE_COALESCED, tensors, tensors, [options, reduction](c10d::Backend& gloo, Tensors& here) {
    for (const at::Tensor& each : here) {
      Tensors own{reduction.of(each)};
      c10d::AllreduceOptions its = options;
      its.reduceOp = reduction.op;
      gloo.allreduce(own, its)->wait();
    }
  });
}

Nccl::Work Nccl::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const Reduction reduction(options.reduceOp, only(tensors));
  const bool is_root = rank_ == options.rootRank;
  return queue(OpType::REDUCE, tensors, tensors, [options, reduction, is_root](c10d::Backend& gloo, Tensors& here) {
    // NCCL leaves the others' as they are; gloo reduces in them.
    Tensors own{reduction.of(is_root ? here[0] : here[0].clone())};
    c10d::ReduceOptions its = options;
    its.reduceOp = reduction.op;
    gloo.reduce(own, its)->wait();
  });
}

Nccl::Work Nccl::allgather(std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& options) {
  only(from);
  const Tensors& all = to.at(0);
  TORCH_CHECK(static_cast<int>(all.size()) == size_, "Tensor list output to all_gather must have one for each rank");
  return queue(OpType::ALLGATHER, joined(from, all), all, [options](c10d::Backend& gloo, Tensors& here) {
    const Tensors everybodys = range(here, 1, here.size() - 1);
    for (std::size_t root = 0; root < everybodys.size(); ++root) {  // they may be of different sizes
      if (static_cast<int>(root) == gloo.getRank()) everybodys[root].copy_(here[0]);
      Tensors one{everybodys[root]};
      c10d::BroadcastOptions its;
      its.rootRank = static_cast<std::int64_t>(root);
      its.timeout = options.timeout;
      gloo.broadcast(one, its)->wait();
    }
  });
}

Nccl::Work Nccl::_allgather_base(at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& options) {
  TORCH_CHECK_WITH(TypeError, to.scalar_type() == from.scalar_type(),
                   "output tensor must have the same type as input tensor");
  TORCH_CHECK_WITH(ValueError, to.numel() == from.numel() * size_,
                   "output tensor size must be equal to world_size times input tensor size");
  return queue(OpType::_ALLGATHER_BASE, {from, to}, {to}, [options](c10d::Backend& gloo, Tensors& here) {
    at::Tensor all = flat(here[1]), own = flat(here[0]).clone();  // it may be a part of them all
    gloo._allgather_base(all, own, options)->wait();
  });
}

Nccl::Work Nccl::allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& options) {
  return queue(OpType::COALESCED, joined(from, to), to, [options](c10d::Backend& gloo, Tensors& here) {
    const std::size_t count = here.size() / 2;
    for (std::size_t i = 0; i < count; ++i) {
      at::Tensor all = flat(here[count + i]), own = flat(here[i]).clone();
      gloo._allgather_base(all, own, options)->wait();
    }
  });
}

Nccl::Work Nccl::gather(std::vector<Tensors>& to, Tensors& from, const c10d::GatherOptions& options) {
  only(from);
  const bool is_root = rank_ == options.rootRank;
  const Tensors all = is_root ? to.at(0) : Tensors();
  return queue(OpType::GATHER, joined(from, all), all, [options, is_root](c10d::Backend& gloo, Tensors& here) {
    Tensors own{here[0].clone()};
    std::vector<Tensors> everybodys;
    if (is_root) everybodys.push_back(range(here, 1, here.size() - 1));
    gloo.gather(everybodys, own, options)->wait();
  });
}

Nccl::Work Nccl::scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ScatterOptions& options) {
  only(to);
  const bool is_root = rank_ == options.rootRank;
  const Tensors all = is_root ? from.at(0) : Tensors();
  return queue(OpType::SCATTER, joined(to, all), to, [options, is_root](c10d::Backend& gloo, Tensors& here) {
    Tensors own{here[0]};
    std::vector<Tensors> everybodys;
    if (is_root) everybodys.push_back(range(here, 1, here.size() - 1));
    gloo.scatter(own, everybodys, options)->wait();
  });
}

Nccl::Work Nccl::reduce_scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ReduceScatterOptions& options) {
  const Reduction reduction(options.reduceOp, only(to));
  TORCH_CHECK(static_cast<int>(from.at(0).size()) == size_, "reduce_scatter needs one tensor for each rank");
  return queue(OpType::REDUCE_SCATTER, joined(to, from[0]), to,
               [options, reduction](c10d::Backend& gloo, Tensors& here) {
                 for (std::size_t root = 0; root + 1 < here.size(); ++root) {  // they may be of different sizes
                   Tensors one{reduction.of(here[root + 1].clone())};
                   c10d::AllreduceOptions its;
                   its.reduceOp = reduction.op;
                   its.timeout = options.timeout;
                   gloo.allreduce(one, its)->wait();
                   if (static_cast<int>(root) == gloo.getRank()) reduction.of(here[0]).copy_(one[0]);
                 }
               });
}

Nccl::Work Nccl::_reduce_scatter_base(at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_WITH(TypeError, to.scalar_type() == from.scalar_type(),
                   "input tensor must be the same type as the output tensor.");
  TORCH_CHECK_WITH(ValueError, from.numel() == to.numel() * size_,
                   "input tensor must be the same size as output size times world size");
  const Reduction reduction(options.reduceOp, to);
  return queue(OpType::_REDUCE_SCATTER_BASE, {to, from}, {to},
               [options, reduction](c10d::Backend& gloo, Tensors& here) {
                 at::Tensor own = reduction.of(flat(here[0])), all = reduction.of(flat(here[1])).clone();
                 at::Tensor made = own.clone();
                 c10d::ReduceScatterOptions its = options;
                 its.reduceOp = reduction.op;
                 gloo._reduce_scatter_base(made, all, its)->wait();
                 own.copy_(made);
               });
}

Nccl::Work Nccl::reduce_scatter_tensor_coalesced(Tensors& to, Tensors& from,
                                                 const c10d::ReduceScatterOptions& options) {
  const Reduction reduction(options.reduceOp, to.at(0));
  return queue(OpType::COALESCED, joined(to, from), to, [options, reduction](c10d::Backend& gloo, Tensors& here) {
    const std::size_t count = here.size() / 2;
    for (std::size_t i = 0; i < count; ++i) {
      at::Tensor own = reduction.of(flat(here[i])), all = reduction.of(flat(here[count + i])).clone();
      at::Tensor made = own.clone();
      c10d::ReduceScatterOptions its = options;
      its.reduceOp = reduction.op;
      gloo._reduce_scatter_base(made, all, its)->wait();
      own.copy_(made);
    }
  });
}

Nccl::Work Nccl::alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<std::int64_t>& to_sizes,
                               std::vector<std::int64_t>& from_sizes, const c10d::AllToAllOptions& options) {
  return queue(OpType::ALLTOALL_BASE, {to, from}, {to},
               [options, to_sizes, from_sizes](c10d::Backend& gloo, Tensors& here) {
                 std::vector<std::int64_t> taken = to_sizes, given = from_sizes;
                 gloo.alltoall_base(here[0], here[1], taken, given, options)->wait();
               });
}

Nccl::Work Nccl::alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& options) {
  return queue(OpType::ALLTOALL, joined(to, from), to, [options](c10d::Backend& gloo, Tensors& here) {
    const std::size_t count = here.size() / 2;
    std::vector<std::int64_t> taken, given;
    Tensors own;
    for (std::size_t i = 0; i < count; ++i) {
      taken.push_back(here[i].numel());
      given.push_back(here[count + i].numel());
      own.push_back(flat(here[count + i]));
    }
    at::Tensor all = at::cat(own);
    at::Tensor got = at::empty({std::accumulate(taken.begin(), taken.end(), std::int64_t{0})}, here[0].options());
    const Tensors parts = got.split_with_sizes(taken);
    gloo.alltoall_base(got, all, taken, given, options)->wait();  // which keeps the sizes
    for (std::size_t i = 0; i < count; ++i) flat(here[i]).copy_(parts[i]);
  });
}

Nccl::Work Nccl::send(Tensors& tensors, int peer, int) {
  only(tensors);
  return queue(
      OpType::SEND, tensors, {},
      [peer](c10d::Backend& gloo, Tensors& here) {
        Tensors own{here[0].is_contiguous() ? here[0] : here[0].contiguous()};
        gloo.send(own, peer, 0)->wait();
      },
      std::pair(peer, true));
}

Nccl::Work Nccl::recv(Tensors& tensors, int peer, int) {
  only(tensors);
  return queue(
      OpType::RECV, tensors, tensors, [peer](c10d::Backend& gloo, Tensors& here) { gloo.recv(here, peer, 0)->wait(); },
      std::pair(peer, false));
}

Nccl::Work Nccl::barrier(const c10d::BarrierOptions& options) {
  std::optional<int> device;
  if (options.device && options.device->is_cuda()) device = options.device->index();
  if (!device || *device < 0) device = device_ >= 0 ? device_ : current_device();
  c10d::BarrierOptions its = options;
  its.device = c10::Device(c10::kCPU);
  its.device_ids.clear();
  return queue(
      OpType::BARRIER, {}, {}, [its](c10d::Backend& gloo, Tensors&) { gloo.barrier(its)->wait(); }, std::nullopt,
      device);
}

void Nccl::startCoalescing() {
  const std::lock_guard lock(mutex_);
  coalesced_.emplace();
}

Nccl::Work Nccl::endCoalescing() {
  const std::lock_guard lock(mutex_);
  std::vector<Work> parts = std::move(coalesced_).value_or(std::vector<Work>());
  coalesced_.reset();
  if (parts.empty()) return nullptr;
  return c10::make_intrusive<CoalescedWork>(rank_, std::move(parts));
}

// ---- the end ----

void Nccl::abort() {
  shared_->is_aborted = true;
  shared_->collectives->abort();
  shared_->pairs->abort();
}

void Nccl::shutdown() {
  std::vector<cudaStream_t> streams;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [pair, stream] : streams_) streams.push_back(stream);
  }
  for (cudaStream_t stream : streams) {
    if (cudaStreamSynchronize(stream) != cudaSuccess) (void)cudaGetLastError();
  }
  abort();
}

void Nccl::abort_all() {
  const std::lock_guard lock(groups().mutex);
  for (Nccl* group : groups().all) group->abort();
}

}  // namespace pretend_gpu
