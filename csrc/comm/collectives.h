// What all ranks do together, over spans of device memory: the door to the others, as backend.h is to the machine.
//
// Units: bytes. Ownership: memory is the caller's. Order: every rank calls the same members with the same sizes in the
// same order, or the member for those that assist meanwhile; on a machine with streams each is ordered on `stream`,
// else it is over when the call returns. Threads: one at a time. Never called with the GIL. A rank that has died or
// hangs makes the call throw MachineError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "device/backend.h"

namespace noria {

enum class ElementType : std::uint8_t { fp32, fp64, fp16, bf16 };

/// Ranks that share a home: each has one part of every unit. `rank` and `size` are among those of one replica of the
/// model, which may be fewer than all; see engine/engine.h, Note [Shards].
struct Shards {
  int rank = 0;
  int size = 1;
  int num_replicas = 1;
  Bytes bytes_of(Bytes whole) const { return {whole.count / size}; }
  Bytes begin_of(Bytes whole) const { return bytes_of(whole) * rank; }
};

/// One shard of `shard` bytes for each rank of the replica, in their order; this rank's own is filled, and afterwards
/// all are.
struct Gather {
  std::byte* all = nullptr;
  Bytes shard;

  /// What a rank gets from the others at least; as much it sends.
  Bytes received(const Shards& shards) const { return shard * (shards.size - 1); }
};

/// A set of parameters, by their number in a unit, as bits.
class ParameterSet {
 public:
  explicit ParameterSet(std::size_t num_parameters) : words_((num_parameters + kBits - 1) / kBits, 0) {}
  void add(std::size_t parameter) { words_[parameter / kBits] |= std::int64_t{1} << (parameter % kBits); }
  bool contains(std::size_t parameter) const { return (words_[parameter / kBits] >> (parameter % kBits) & 1) != 0; }
  const std::vector<std::int64_t>& words() const { return words_; }
  /// Those of several sets of as many parameters, behind each other.
  void add_all(const std::vector<std::int64_t>& words) {
    for (std::size_t i = 0; i < words.size(); ++i) words_[i % words_.size()] |= words[i];
  }

 private:
  static constexpr std::size_t kBits = 32;
  std::vector<std::int64_t> words_;
};

/// One shard of `shard` bytes for each rank of the replica, in their order. Each element is multiplied by 1 / size and
/// summed over them, then over the ranks of other replicas with the same shard; afterwards this rank's own shard holds
/// its part of the sum, plus what `add` says, and the others hold anything.
struct Reduction {
  std::byte* all = nullptr;
  Bytes shard;
  ElementType type = ElementType::fp32;
  std::byte* scratch = nullptr;  // 4 bytes for each element of `all`: multiplied and summed in fp32 there
  std::byte* part = nullptr;     // `shard` bytes, for what `add` brings
  std::vector<std::pair<std::byte*, Bytes>> zero;  // before all else: where no gradient has come
  std::vector<CopySpan> add;  // after the sum, elements out of the home onto those in the own shard
  // Whose gradients this rank has, and where those of any rank are entered before the ticket is given. Null: nobody
  // asks; on all ranks alike.
  std::shared_ptr<const ParameterSet> arrived;
  std::shared_ptr<ParameterSet> arrived_anywhere;

  /// What a rank gets from the others at least; as much it sends.
  Bytes received(const Shards& shards) const {
    const bool is_narrow = type == ElementType::fp16 || type == ElementType::bf16;
    const Bytes summed = shard * (scratch != nullptr && is_narrow ? 2 : 1);
    const std::int64_t across = 2 * summed.count * (shards.num_replicas - 1) / shards.num_replicas;
    return summed * (shards.size - 1) + Bytes{across};
  }
};

/// By rank: who wants the whole of a unit, or has gradients of it. The others assist: they need no memory for a unit.
using Wanting = std::vector<bool>;

/// What an assisting rank gives to a gather: its own shard.
struct Giving {
  const std::byte* own = nullptr;  // in host memory
  Bytes shard;
  std::byte* scratch = nullptr;  // as many bytes on the device
};

/// What an assisting rank takes from a reduction to which it adds nothing: its shard of the sum.
struct Taking {
  std::byte* to = nullptr;  // in host memory, which the device can read
  Bytes shard;
  ElementType type = ElementType::fp32;
  std::byte* scratch = nullptr;              // `shard` bytes on the device
  std::byte* wide = nullptr;                 // 4 bytes for each element: the sum is one in fp32
  std::vector<std::pair<Bytes, Bytes>> add;  // ranges of `to` that hold something to which the sum is added
};

class Collectives {
 public:
  virtual ~Collectives() = default;
  Collectives() = default;
  Collectives(const Collectives&) = delete;  // owns a process group
  Collectives& operator=(const Collectives&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual Shards shards() const = 0;
  virtual Stream stream() const = 0;

  virtual void gather(const Gather& gathered) = 0;
  virtual void reduce(const Reduction& reduced) = 0;
  // Where some ranks assist: they call `give` while the others call `gather_some`, and `take` while they `reduce_some`.
  virtual void gather_some(const Gather& gathered, const Wanting& wanting) = 0;
  virtual void give(const Giving& given, const Wanting& wanting) = 0;
  virtual void reduce_some(const Reduction& reduced) = 0;
  virtual void take(const Taking& taken) = 0;
  /// Everybody's numbers, by rank, behind each other; as many from each. Over when the call returns.
  virtual std::vector<std::int64_t> exchange(const std::vector<std::int64_t>& numbers) = 0;
};

}  // namespace noria
