#include "bindings/c10d_collectives.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <functional>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "bindings/element_types.h"
#include "bindings/torch_compat.h"

namespace noria {
namespace {

// torch 2.13 renamed these.
void gather_into(c10d::ProcessGroup& group, at::Tensor& all, at::Tensor& own) {
#if NORIA_TORCH_AT_LEAST(2, 13)
  group.all_gather_single(all, own)->wait();
#else
  group._allgather_base(all, own)->wait();
#endif
}

void reduce_into(c10d::ProcessGroup& group, at::Tensor& own, at::Tensor& all) {
#if NORIA_TORCH_AT_LEAST(2, 13)
  group.reduce_scatter_single(own, all)->wait();
#else
  group._reduce_scatter_base(own, all)->wait();
#endif
}

void sum_over(c10d::ProcessGroup& group, at::Tensor& own) {
  std::vector<at::Tensor> tensors{own};
  group.allreduce(tensors)->wait();
}

class C10dCollectives final : public Collectives {
 public:
  C10dCollectives(const std::string& shards, const std::string& across, const std::string& numbers,
                  std::vector<int> replica, c10::Device device)
      : within_(resolve(shards)),
        across_(resolve(across)),
        numbers_(resolve(numbers)),
        replica_(std::move(replica)),
        device_(device) {
    if (!device_.is_cpu()) stream_ = c10::impl::VirtualGuardImpl(device_.type()).getNewStream(device_);
  }

  int rank() const override { return numbers_->getRank(); }
  int size() const override { return numbers_->getSize(); }
  Shards shards() const override {
    const int num_replicas = across_ ? across_->getSize() : 1;
    return within_ ? Shards{within_->getRank(), within_->getSize(), num_replicas} : Shards{0, 1, num_replicas};
  }
  Stream stream() const override { return stream_ ? Stream::of(stream_->native_handle()) : Stream(); }

  void gather(const Gather& gathered) override {
    if (!within_) return;
    const Shards own_of = shards();
    const Bytes whole = gathered.shard * own_of.size;
    together("an all-gather of " + to_string(whole), [&] {
      at::Tensor all = over(gathered.all, at::kByte, whole);
      at::Tensor own = all.narrow(0, own_of.begin_of(whole).count, gathered.shard.count);
      gather_into(*within_, all, own);
    });
  }

  void reduce(const Reduction& reduced) override {
    together("a sum of " + to_string(reduced.shard * shards().size), [&] {
      reduce_with(reduced, [&](at::Tensor& all, at::Tensor& own) {
        if (within_) reduce_into(*within_, own, all);
        if (across_) sum_over(*across_, own);
      });
    });
  }

  void gather_some(const Gather& gathered, const Wanting& wanting) override {
    const Shards own_of = shards();
    const Bytes whole = gathered.shard * own_of.size;
    together("a gather of " + to_string(whole), [&] {
      const at::Tensor all = over(gathered.all, at::kByte, whole);
      gather_for(wanting, all.narrow(0, own_of.begin_of(whole).count, gathered.shard.count), all);
    });
  }

  void give(const ShardSend& given, const Wanting& wanting) override {
    together("a gather of " + to_string(given.shard * shards().size) + ", which only other ranks want whole,", [&] {
      const at::Tensor own = over(given.scratch, at::kByte, given.shard);
      std::int64_t begin = 0;
      for (const auto& [piece, bytes] : given.own) {
        own.narrow(0, begin, bytes.count).copy_(at_home(piece, at::kByte, bytes), /*non_blocking=*/true);
        begin += bytes.count;
      }
      gather_for(wanting, own, {});
    });
  }

  void reduce_some(const Reduction& reduced) override {
    const int num_shards = shards().size;
    together("a sum of " + to_string(reduced.shard * num_shards), [&] {
      reduce_with(reduced, [&](at::Tensor& all, at::Tensor& own) {
        const Parts parts = all.chunk(num_shards);
        for (int each = 0; each < num_shards; ++each) {
          if (within_) reduce_to(each, parts[static_cast<std::size_t>(each)]);
          // At the same point here and in `take`. If replicas did this at different points, they would wait for each
          // other in a circle.
          if (each == shards().rank && across_) sum_over(*across_, own);
        }
      });
    });
  }

  void take(const ShardReceive& taken) override {
    const Shards own_of = shards();
    together("a sum of " + to_string(taken.shard * own_of.size) + ", to which this rank adds nothing,", [&] {
      const at::ScalarType type = scalar_type(taken.type);
      at::Tensor part = over(taken.scratch, type, taken.shard);
      at::Tensor sum = taken.wide == nullptr ? part : over(taken.wide, at::kFloat, Bytes{4 * part.numel()});
      for (int each = 0; each < own_of.size; ++each) {
        sum.zero_();  // another rank's sum may be in it
        if (within_) reduce_to(each, sum);
        if (each != own_of.rank) continue;
        if (across_) sum_over(*across_, sum);
        if (taken.wide != nullptr) part.copy_(sum);
        for (const auto& [from, to] : taken.add) {
          over(taken.scratch + from.count, type, to - from).add_(over(taken.to + from.count, type, to - from));
        }
        at_home(taken.to, type, taken.shard).copy_(part, /*non_blocking=*/true);
      }
    });
  }

  std::vector<std::int64_t> exchange(const std::vector<std::int64_t>& numbers) override {
    std::vector<std::int64_t> all(numbers.size() * static_cast<std::size_t>(size()));
    together("an exchange of numbers", [&] {
      const auto count = static_cast<std::int64_t>(numbers.size());
      at::Tensor own = at::from_blob(const_cast<std::int64_t*>(numbers.data()), {count}, at::kLong);
      at::Tensor gathered = at::from_blob(all.data(), {count * size()}, at::kLong);
      gather_into(*numbers_, gathered, own);
    });
    return all;
  }

 private:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  static Group resolve(const std::string& name) { return name.empty() ? Group() : c10d::resolve_process_group(name); }

  using Parts = std::vector<at::Tensor>;

  // Multiplies by 1 / size, calls `sum`, and adds what `reduced.add` names. `sum` works in place: it sums `all` inside
  // the replica, then this rank's shard `own` across replicas.
  void reduce_with(const Reduction& reduced, const std::function<void(at::Tensor& all, at::Tensor& own)>& sum) const {
    for (const auto& [memory, bytes] : reduced.zero) over(memory, at::kByte, bytes).zero_();
    const Shards own_shards = shards();
    const at::ScalarType type = scalar_type(reduced.type);
    const at::Tensor all = over(reduced.all, type, reduced.shard * own_shards.size);
    const std::int64_t count = all.numel() / own_shards.size;
    const auto own_of = [&](const at::Tensor& of) { return of.narrow(0, own_shards.rank * count, count); };
    at::Tensor made = all;
    if (reduced.scratch != nullptr) {
      made = over(reduced.scratch, at::kFloat, Bytes{4 * all.numel()});
      made.copy_(all);
    }
    // Not mul_, which rounds the factor to the tensor's dtype first. mul_out multiplies in fp32.
    at::mul_out(made, made, at::native::wrapped_scalar_tensor(1.0 / size()));
    at::Tensor own = own_of(made);
    sum(made, own);
    if (reduced.scratch != nullptr) own_of(all).copy_(own);
    for (const CopySpan& each : reduced.add) {
      // Copies first. If the kernel read over the link, it would take as long and occupy the cores of the device.
      at::Tensor held = over(reduced.part, type, each.bytes);
      held.copy_(at_home(each.from, type, each.bytes), /*non_blocking=*/true);
      over(each.to, type, each.bytes).add_(held);
    }
  }

  // Gathers to each rank of this replica that wants the whole, one after the other. `all`: memory for the whole, if
  // this rank wants it.
  void gather_for(const Wanting& wanting, const at::Tensor& own, const at::Tensor& all) const {
    for (std::size_t root = 0; root < replica_.size(); ++root) {
      if (!wanting[static_cast<std::size_t>(replica_[root])]) continue;
      std::vector<Parts> to;
      if (static_cast<int>(root) == shards().rank) to.push_back(all.chunk(shards().size));
      Parts from{own};
      c10d::GatherOptions options;
      options.rootRank = static_cast<std::int64_t>(root);
      within_->gather(to, from, options)->wait();
    }
  }

  void reduce_to(int root, const at::Tensor& part) const {
    Parts parts{part};
    c10d::ReduceOptions options;
    options.rootRank = root;
    within_->reduce(parts, options)->wait();
  }

  // Returns a host tensor over home memory, which not every device can address.
  static at::Tensor at_home(const std::byte* memory, at::ScalarType type, Bytes bytes) {
    const auto count = bytes.count / static_cast<std::int64_t>(c10::elementSize(type));
    return at::from_blob(const_cast<std::byte*>(memory), {count}, at::TensorOptions().dtype(type));
  }

  at::Tensor over(const std::byte* memory, at::ScalarType type, Bytes bytes) const {
    const auto count = bytes.count / static_cast<std::int64_t>(c10::elementSize(type));
    return at::from_blob(
        const_cast<std::byte*>(memory), {count}, {1}, 0, [](void*) {}, at::TensorOptions().dtype(type).device(device_),
        device_);
  }

  void together(const std::string& what, const std::function<void()>& act) const {
    const at::NoGradGuard no_grad;
    std::optional<c10::StreamGuard> on;
    if (stream_) on.emplace(*stream_);
    try {
      act();
    } catch (const std::exception& error) {
      throw MachineError("rank " + std::to_string(rank()) + " of " + std::to_string(size()) + ": " + what +
                         " failed; a rank has died, raised, or hung for longer than the process group's timeout (" +
                         error.what() + ")");
    }
  }

  const Group within_, across_, numbers_;  // the first two are null if this rank is alone in them
  const std::vector<int> replica_;         // the ranks of `within_`, as `numbers_` counts them
  const c10::Device device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace

std::shared_ptr<Collectives> make_c10d_collectives(const std::string& shards, const std::string& across,
                                                   const std::string& numbers, std::vector<int> replica,
                                                   c10::Device device) {
  return std::make_shared<C10dCollectives>(shards, across, numbers, std::move(replica), device);
}

}  // namespace noria
