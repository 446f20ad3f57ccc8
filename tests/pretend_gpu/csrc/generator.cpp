#include "generator.h"

#include <ATen/Utils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <mutex>
#include <random>
#include <vector>

#include "streams.h"

namespace pretend_gpu {
namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(int device) : c10::GeneratorImpl(device_of(device), c10::DispatchKeySet(kKey)) {}

  void set_current_seed(std::uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(std::uint64_t offset) override { offset_ = offset; }
  std::uint64_t get_offset() const override { return offset_; }
  std::uint64_t current_seed() const override { return seed_; }
  std::uint64_t seed() override {
    set_current_seed(std::random_device()());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.dtype() == at::kByte && state.is_contiguous(),
                "RNG state must be a torch.ByteTensor");
    const std::int64_t num_bytes = state.numel();
    TORCH_CHECK(num_bytes == 8 || num_bytes == 16, "RNG state is wrong size");
    const auto* words = static_cast<const std::uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = num_bytes == 16 ? words[1] : 0;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const at::Tensor state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    const std::uint64_t words[2] = {seed_, offset_};
    std::memcpy(state.mutable_data_ptr(), words, sizeof(words));
    return state.getIntrusivePtr();
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::intrusive_ptr<c10::GeneratorImpl>::reclaim(clone_impl());
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    set_current_seed(state->current_seed());
    offset_ = state->get_offset();
  }

  std::uint64_t take() {
    offset_ += 4;  // as one kernel of CUDA does at least
    std::uint64_t mixed = seed_ * 0x9e3779b97f4a7c15 + offset_;
    mixed = (mixed ^ (mixed >> 32)) * 0xbf58476d1ce4e5b9;
    return mixed ^ (mixed >> 29);
  }

 private:
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  std::uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

}  // namespace

at::Generator new_generator(int device) {
  return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device);
}

const at::Generator& default_generator(int device) {
  static const auto* all = [] {
    auto* made = new std::vector<at::Generator>;  // outlives static tensors
    for (int i = 0; i < fake_cuda::kNumDevices; ++i) made->push_back(new_generator(i));
    return made;
  }();
  return all->at(static_cast<std::size_t>(device < 0 ? current_device() : device));
}

std::uint64_t take_seed(const std::optional<at::Generator>& given, int device) {
  at::Generator generator = given && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(generator.device().type() == kDevice, "Expected a '", kDevice, "' device type for generator but found '",
              generator.device().type(), "'");
  const std::lock_guard lock(generator.mutex());
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->take();
}

}  // namespace pretend_gpu
