// The driver's calls that noria makes (csrc/device/cuda_kernels.h): modules are not looked at, and noria's kernels are
// those of kernels/update.cu, compiled for the host. They run in the order of their stream, on the memory of the
// device.
#define NORIA_FLUSHES 2
#include "kernels/update.cu"

#include <functional>
#include <map>
#include <string>

#include "fake_cuda.h"

struct CUmod_st {};
struct CUfunc_st {
  std::function<void(CUstream_st* stream, void** parameters)> launch;
};

namespace noria {
namespace {

constexpr int kNotFound = 500;  // CUDA_ERROR_NOT_FOUND

template <class Element>
Element* reached(Element* memory, std::size_t count) {
  if (memory == nullptr) return nullptr;
  void* const found = fake_cuda::reach(memory, count * sizeof(Element));
  if (found == nullptr) fake_cuda::set_sticky_error(cudaErrorIllegalAddress);
  return static_cast<Element*>(found);
}

UnitArrays reached(const UnitArrays& arrays, std::size_t count) {
  UnitArrays result;
  result.master = reached(arrays.master, count);
  result.working = reached(arrays.working, count);
  result.low = reached(arrays.low, count);
  result.m.fp32 = reached(arrays.m.fp32, count);
  result.v.fp32 = reached(arrays.v.fp32, count);
  return result;
}

const void* reached_gradients(const void* gradients, std::size_t count, bool is_split) {
  if (is_split) return reached(static_cast<const std::uint16_t*>(gradients), count);
  return reached(static_cast<const float*>(gradients), count);
}

template <class Value>
Value argument(void** parameters, int number) {
  return *static_cast<Value*>(parameters[number]);
}

void run(CUstream_st* stream, std::function<void()> work) { (void)fake_cuda::run_on(stream, std::move(work)); }

using Update = void (*)(UnitArrays, const void*, std::size_t, UpdateScalars);
using Sum = void (*)(const void*, std::size_t, std::size_t, double*);

CUfunc_st update(Update kernel, bool is_split, bool is_flushed) {
  return {[=](CUstream_st* stream, void** parameters) {
    const auto arrays = argument<UnitArrays>(parameters, 0);
    const auto gradients = argument<const void*>(parameters, 1);
    const auto count = argument<std::size_t>(parameters, 2);
    const auto scalars = argument<UpdateScalars>(parameters, 3);
    run(stream, [=] {
      const UnitArrays there = reached(arrays, count);
      const void* const read = reached_gradients(gradients, count, is_split);
      if (read == nullptr) return;
      const FlushDenormals flush(is_flushed);
      kernel(there, read, count, scalars);
    });
  }};
}

CUfunc_st sum(Sum kernel, bool is_split) {
  return {[=](CUstream_st* stream, void** parameters) {
    const auto gradients = argument<const void*>(parameters, 0);
    const auto count = argument<std::size_t>(parameters, 1), chunk = argument<std::size_t>(parameters, 2);
    const auto sums = argument<double*>(parameters, 3);
    run(stream, [=] {
      double* const written = reached(sums, (count + chunk - 1) / chunk * kSumSpan);
      const void* const read = reached_gradients(gradients, count, is_split);
      if (read != nullptr && written != nullptr) kernel(read, count, chunk, written);
    });
  }};
}

CUfunc_st add_sums() {
  return {[](CUstream_st* stream, void** parameters) {
    const auto sums = argument<double*>(parameters, 0);
    const auto num_chunks = argument<std::size_t>(parameters, 1);
    run(stream, [=] {
      if (double* const written = reached(sums, kSumSpan * num_chunks)) noria_add_sums(written, num_chunks);
    });
  }};
}

std::map<std::string, CUfunc_st>& kernels() {
  static auto* const found = new std::map<std::string, CUfunc_st>{
      {"noria_update_adamw_whole", update(noria_update_adamw_whole, false, true)},
      {"noria_update_adamw_split", update(noria_update_adamw_split, true, true)},
      {"noria_update_adam_whole", update(noria_update_adam_whole, false, true)},
      {"noria_update_adam_split", update(noria_update_adam_split, true, true)},
      {"noria_update_sgd_whole", update(noria_update_sgd_whole, false, true)},
      {"noria_update_sgd_split", update(noria_update_sgd_split, true, true)},
      {"noria_update_sgd_momentum_whole", update(noria_update_sgd_momentum_whole, false, true)},
      {"noria_update_sgd_momentum_split", update(noria_update_sgd_momentum_split, true, true)},
      {"noria_update_lion_whole", update(noria_update_lion_whole, false, false)},
      {"noria_update_lion_split", update(noria_update_lion_split, true, false)},
      {"noria_sum_whole", sum(noria_sum_whole, false)},
      {"noria_sum_split", sum(noria_sum_split, true)},
      {"noria_add_sums", add_sums()},
  };
  return *found;
}

}  // namespace
}  // namespace noria

extern "C" {

int cuModuleLoadData(CUmod_st** module, const void* /*image*/) {
  static CUmod_st only;
  *module = &only;
  return 0;
}

int cuModuleGetFunction(CUfunc_st** function, CUmod_st* /*module*/, const char* name) {
  const auto found = noria::kernels().find(name);
  if (found == noria::kernels().end()) return noria::kNotFound;
  *function = &found->second;
  return 0;
}

int cuLaunchKernel(CUfunc_st* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   CUstream_st* stream, void** parameters, void**) {
  function->launch(stream, parameters);
  return 0;
}

}  // extern "C"
