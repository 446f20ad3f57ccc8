#include "nccl.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <c10/core/StreamGuard.h>

#include <chrono>
#include <numeric>
#include <set>
#include <string>

#include "gloo.h"
#include "nccl_work.h"
#include "operand.h"

namespace pretend_gpu {

using c10d::OpType;
using RedOp = c10d::ReduceOp::RedOpType;

namespace {

/// The groups that there are.
struct Groups {
  std::mutex mutex;
  std::set<Nccl*> all;
};

Groups& groups() {
  static Groups* the_groups = new Groups;
  return *the_groups;
}

constexpr auto kDefaultTimeout = std::chrono::minutes(10);  // NCCL's in torch

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
  template <class Options>
  Options in(Options options) const {
    options.reduceOp = op;
    return options;
  }
};

at::Tensor flat(const at::Tensor& tensor) { return tensor.view({-1}); }

Tensors joined(const Tensors& first, const Tensors& second) {
  Tensors all = first;
  all.insert(all.end(), second.begin(), second.end());
  return all;
}

Tensors from_second(const Tensors& tensors) { return {tensors.begin() + 1, tensors.end()}; }

const at::Tensor& only(const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "Expecting one tensor only but got multiple");
  return tensors[0];
}

void gather_into(Gloo& gloo, const at::Tensor& to, const at::Tensor& from, const c10d::AllgatherOptions& options) {
  at::Tensor all = flat(to), own = flat(from);
  gloo.finish(gloo.collectives->_allgather_base(all, own, options));
}

void reduce_all(Gloo& gloo, const at::Tensor& tensor, const Reduction& reduction,
                const c10d::AllreduceOptions& options) {
  Tensors own{reduction.of(tensor)};
  gloo.finish(gloo.collectives->allreduce(own, reduction.in(options)));
}

/// As gloo does it, whose own work of this kind is never over until a thread waits for it.
void reduce_into(Gloo& gloo, const at::Tensor& to, const at::Tensor& from, const Reduction& reduction,
                 const c10d::ReduceScatterOptions& options) {
  const at::Tensor all = flat(from);
  c10d::AllreduceOptions its;
  its.timeout = options.timeout;
  reduce_all(gloo, all, reduction, its);
  flat(to).copy_(all.chunk(gloo.collectives->getSize())[static_cast<std::size_t>(gloo.rank())]);
}

}  // namespace

Nccl::Options::Options() : c10d::Backend::Options("nccl", kDefaultTimeout) {}

Nccl::Nccl(int rank, int size, c10::intrusive_ptr<Options> options, c10::intrusive_ptr<c10d::Backend> collectives,
           c10::intrusive_ptr<c10d::Backend> pairs)
    : c10d::Backend(rank, size),
      options_(std::move(options)),
      gloo_(std::make_shared<Gloo>(std::move(collectives), std::move(pairs), options_->timeout)) {
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
  gloo_->set_timeout(timeout);
}

c10d::ErrorType Nccl::getError() {
  return gloo_->failure().empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
}

// ---- one call ----

void Nccl::check_alive() const {
  const std::string failure = gloo_->failure();
  if (failure.empty() && !gloo_->is_aborted()) return;
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
              "a group of the pretend GPU's NCCL stays on the device of its first call, cuda:", device_,
              "; found cuda:", found);
  return device_ = found;
}

c10::Stream Nccl::stream_for(std::optional<Pair> pair) {
  cudaStream_t& stream = streams_[pair];
  if (stream == nullptr) {
    const OnDevice on(device_);
    stream = fake_cuda::make_stream(/*is_patient=*/true);
  }
  return external_stream(reinterpret_cast<std::uintptr_t>(stream), device_);
}

/// The tensors of calls that the device has passed are let go.
void Nccl::forget_passed() {
  std::erase_if(kept_, [](const Kept& each) {
    if (cudaEventQuery(each.event) != cudaSuccess) {  // not yet; or it is not known, after a failure
      (void)cudaGetLastError();
      return false;
    }
    each.shelf->clear();
    cudaEventDestroy(each.event);
    return true;
  });
}

Nccl::Work Nccl::queue(OpType type, const Tensors& tensors, const Tensors& results, const Act& act,
                       std::optional<Pair> pair, std::optional<int> device) {
  static const std::map<OpType, std::string> names = [] {
    std::map<OpType, std::string> made;
    for (int each = 0; each <= static_cast<int>(OpType::REDUCE_SCATTER_TENSOR_COALESCED); ++each) {
      made[static_cast<OpType>(each)] = "nccl " + c10d::opTypeToString(static_cast<OpType>(each));
    }
    return made;
  }();
  const std::string& name = names.at(type);
  const std::lock_guard lock(mutex_);
  check_alive();
  const int on_device = device_for(tensors, device);
  const c10::Stream stream = stream_for(pair);
  forget_passed();

  // NCCL is given pointers that are not const, even if it only reads.
  std::vector<std::pair<Operand, bool>> operands;
  for (const at::Tensor& each : tensors) {
    const bool is_result = std::ranges::any_of(results, [&](const at::Tensor& result) { return result.is_same(each); });
    operands.emplace_back(operand_of(each, Access::write), is_result);
    check_reachable(operands.back().first, on_device, name);
  }
  cudaEvent_t ready = make_event(on_device);
  record_event(ready, current_stream(on_device));
  wait_event(ready, stream);
  cudaEventDestroy(ready);

  auto outcome = std::make_shared<Outcome>();
  launch_on(stream, name, [gloo = gloo_, outcome, act, type, operands = std::move(operands)] {
    const auto begun = std::chrono::steady_clock::now();
    try {
      TORCH_CHECK(!gloo->is_aborted() && gloo->failure().empty(), "the communicator was aborted before it ran");
      const at::AutoDispatchBelowADInplaceOrView no_autograd;
      Tensors copies;
      for (const auto& [operand, is_result] : operands) copies.push_back(Aliases().of(operand).clone());
      act(*gloo, copies);
      for (std::size_t i = 0; i < operands.size(); ++i) {
        if (operands[i].second) Aliases().of(operands[i].first).copy_(copies[i]);
      }
    } catch (const std::exception& error) {
      const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begun);
      const bool is_late = ms.count() >= gloo->timeout_ms();
      const std::string text = c10::str(
          "[Rank ", gloo->rank(), "] ", is_late ? "Watchdog caught collective operation timeout: " : "NCCL error: ",
          "WorkNCCL(OpType=", c10d::opTypeToString(type), ", Timeout(ms)=", gloo->timeout_ms(), ") ran for ",
          ms.count(), " milliseconds and failed: ", reason_of(error));
      outcome->fail(std::make_exception_ptr(
          c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, text)));
      gloo->fail(text);
      if (!gloo->is_aborted()) record_failure(text, cudaErrorUnknown);
    }
  });
  const auto shelf = std::make_shared<Shelf>(tensors);
  kept_.push_back({make_event(on_device), shelf});
  record_event(kept_.back().event, stream);
  cudaEvent_t over = make_event(on_device);
  record_event(over, stream);
  const c10::StreamGuard guard(stream);
  auto work = c10::make_intrusive<QueuedWork>(rank_, type, over, on_device, outcome, shelf, results, ++num_calls_);
  if (coalesced_) coalesced_->push_back(work);
  return work;
}

// ---- the calls ----

Nccl::Work Nccl::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  only(tensors);
  return queue(OpType::BROADCAST, tensors, tensors,
               [options](Gloo& gloo, Tensors& here) { gloo.finish(gloo.collectives->broadcast(here, options)); });
}

Nccl::Work Nccl::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const Reduction reduction(options.reduceOp, only(tensors));
  return queue(OpType::ALLREDUCE, tensors, tensors,
               [options, reduction](Gloo& gloo, Tensors& here) { reduce_all(gloo, here[0], reduction, options); });
}

Nccl::Work Nccl::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const Reduction reduction(options.reduceOp, tensors.at(0));
  return queue(OpType::ALLREDUCE_COALESCED, tensors, tensors, [options, reduction](Gloo& gloo, Tensors& here) {
    for (const at::Tensor& each : here) reduce_all(gloo, each, reduction, options);
  });
}

/// The others' tensors stay as they are; gloo reduces in its copies.
Nccl::Work Nccl::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const Reduction reduction(options.reduceOp, only(tensors));
  const Tensors results = rank_ == options.rootRank ? tensors : Tensors();
  return queue(OpType::REDUCE, tensors, results, [options, reduction](Gloo& gloo, Tensors& here) {
    Tensors own{reduction.of(here[0])};
    gloo.finish(gloo.collectives->reduce(own, reduction.in(options)));
  });
}

Nccl::Work Nccl::allgather(std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& options) {
  only(from);
  const Tensors& all = to.at(0);
  TORCH_CHECK(static_cast<int>(all.size()) == size_, "Tensor list output to all_gather must have one for each rank");
  return queue(OpType::ALLGATHER, joined(from, all), all, [options](Gloo& gloo, Tensors& here) {
    for (std::size_t root = 0; root + 1 < here.size(); ++root) {  // they may be of different sizes
      if (static_cast<int>(root) == gloo.rank()) here[root + 1].copy_(here[0]);
      Tensors one{here[root + 1]};
      c10d::BroadcastOptions its;
      its.rootRank = static_cast<std::int64_t>(root);
      its.timeout = options.timeout;
      gloo.finish(gloo.collectives->broadcast(one, its));
    }
  });
}

Nccl::Work Nccl::_allgather_base(at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& options) {
  TORCH_CHECK_WITH(TypeError, to.scalar_type() == from.scalar_type(),
                   "output tensor must have the same type as input tensor");
  TORCH_CHECK_WITH(ValueError, to.numel() == from.numel() * size_,
                   "output tensor size must be equal to world_size times input tensor size");
  return queue(OpType::_ALLGATHER_BASE, {from, to}, {to},
               [options](Gloo& gloo, Tensors& here) { gather_into(gloo, here[1], here[0], options); });
}

Nccl::Work Nccl::allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& options) {
  return queue(OpType::COALESCED, joined(from, to), to, [options](Gloo& gloo, Tensors& here) {
    const std::size_t count = here.size() / 2;
    for (std::size_t i = 0; i < count; ++i) gather_into(gloo, here[count + i], here[i], options);
  });
}

Nccl::Work Nccl::gather(std::vector<Tensors>& to, Tensors& from, const c10d::GatherOptions& options) {
  only(from);
  const bool is_root = rank_ == options.rootRank;
  const Tensors all = is_root ? to.at(0) : Tensors();
  return queue(OpType::GATHER, joined(from, all), all, [options, is_root](Gloo& gloo, Tensors& here) {
    Tensors own{here[0]};
    std::vector<Tensors> gathered;
    if (is_root) gathered.push_back(from_second(here));
    gloo.finish(gloo.collectives->gather(gathered, own, options));
  });
}

Nccl::Work Nccl::scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ScatterOptions& options) {
  only(to);
  const bool is_root = rank_ == options.rootRank;
  const Tensors all = is_root ? from.at(0) : Tensors();
  return queue(OpType::SCATTER, joined(to, all), to, [options, is_root](Gloo& gloo, Tensors& here) {
    Tensors own{here[0]};
    std::vector<Tensors> gathered;
    if (is_root) gathered.push_back(from_second(here));
    gloo.finish(gloo.collectives->scatter(own, gathered, options));
  });
}

Nccl::Work Nccl::reduce_scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ReduceScatterOptions& options) {
  const Reduction reduction(options.reduceOp, only(to));
  TORCH_CHECK(static_cast<int>(from.at(0).size()) == size_, "reduce_scatter needs one tensor for each rank");
  return queue(OpType::REDUCE_SCATTER, joined(to, from[0]), to, [options, reduction](Gloo& gloo, Tensors& here) {
    for (std::size_t root = 0; root + 1 < here.size(); ++root) {  // they may be of different sizes
      c10d::AllreduceOptions its;
      its.timeout = options.timeout;
      reduce_all(gloo, here[root + 1], reduction, its);
      if (static_cast<int>(root) == gloo.rank()) here[0].copy_(here[root + 1]);
    }
  });
}

Nccl::Work Nccl::_reduce_scatter_base(at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_WITH(TypeError, to.scalar_type() == from.scalar_type(),
                   "input tensor must be the same type as the output tensor.");
  TORCH_CHECK_WITH(ValueError, from.numel() == to.numel() * size_,
                   "input tensor must be the same size as output size times world size");
  const Reduction reduction(options.reduceOp, to);
  return queue(OpType::_REDUCE_SCATTER_BASE, {to, from}, {to}, [options, reduction](Gloo& gloo, Tensors& here) {
    reduce_into(gloo, here[0], here[1], reduction, options);
  });
}

Nccl::Work Nccl::reduce_scatter_tensor_coalesced(Tensors& to, Tensors& from,
                                                 const c10d::ReduceScatterOptions& options) {
  const Reduction reduction(options.reduceOp, to.at(0));
  return queue(OpType::COALESCED, joined(to, from), to, [options, reduction](Gloo& gloo, Tensors& here) {
    const std::size_t count = here.size() / 2;
    for (std::size_t i = 0; i < count; ++i) reduce_into(gloo, here[i], here[count + i], reduction, options);
  });
}

Nccl::Work Nccl::alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<std::int64_t>& to_sizes,
                               std::vector<std::int64_t>& from_sizes, const c10d::AllToAllOptions& options) {
  return queue(OpType::ALLTOALL_BASE, {to, from}, {to}, [options, to_sizes, from_sizes](Gloo& gloo, Tensors& here) {
    std::vector<std::int64_t> taken = to_sizes, given = from_sizes;
    gloo.finish(gloo.collectives->alltoall_base(here[0], here[1], taken, given, options));
  });
}

Nccl::Work Nccl::alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& options) {
  return queue(OpType::ALLTOALL, joined(to, from), to, [options](Gloo& gloo, Tensors& here) {
    const std::size_t count = here.size() / 2;
    std::vector<std::int64_t> taken, given;
    Tensors own;
    for (std::size_t i = 0; i < count; ++i) {
      taken.push_back(here[i].numel());
      given.push_back(here[count + i].numel());
      own.push_back(flat(here[count + i]));
    }
    at::Tensor all = at::cat(own);
    at::Tensor got = here[0].new_empty({std::accumulate(taken.begin(), taken.end(), std::int64_t{0})});
    const Tensors parts = got.split_with_sizes(taken);
    gloo.finish(gloo.collectives->alltoall_base(got, all, taken, given, options));  // which keeps the sizes
    for (std::size_t i = 0; i < count; ++i) flat(here[i]).copy_(parts[i]);
  });
}

Nccl::Work Nccl::send(Tensors& tensors, int peer, int) {
  only(tensors);
  const Act act = [peer](Gloo& gloo, Tensors& here) { gloo.finish_pair(gloo.pairs->send(here, peer, 0)); };
  return queue(OpType::SEND, tensors, {}, act, Pair{peer, true});
}

Nccl::Work Nccl::recv(Tensors& tensors, int peer, int) {
  only(tensors);
  const Act act = [peer](Gloo& gloo, Tensors& here) { gloo.finish_pair(gloo.pairs->recv(here, peer, 0)); };
  return queue(OpType::RECV, tensors, tensors, act, Pair{peer, false});
}

Nccl::Work Nccl::barrier(const c10d::BarrierOptions& options) {
  std::optional<int> device;
  if (options.device && options.device->is_cuda()) device = options.device->index();
  if (!device || *device < 0) device = device_ >= 0 ? device_ : current_device();
  c10d::BarrierOptions its;
  its.timeout = options.timeout;
  const Act act = [its](Gloo& gloo, Tensors&) { gloo.finish(gloo.collectives->barrier(its)); };
  return queue(OpType::BARRIER, {}, {}, act, std::nullopt, device);
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

void Nccl::abort() { gloo_->abort(); }

void Nccl::shutdown() {
  std::vector<cudaStream_t> streams;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [pair, stream] : streams_) streams.push_back(stream);
  }
  for (cudaStream_t stream : streams) {
    if (cudaStreamSynchronize(stream) != cudaSuccess) (void)cudaGetLastError();
  }
}

void Nccl::abort_all() {
  const std::lock_guard lock(groups().mutex);
  for (Nccl* group : groups().all) group->abort();
}

}  // namespace pretend_gpu
