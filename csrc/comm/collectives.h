// Collectives declares what all ranks do together, over spans of device memory. All traffic to other ranks goes through
// it, as all traffic to the machine goes through backend.h.
//
// Units: bytes. Ownership: memory is the caller's.
// Order: every rank calls the same members with the same sizes in the same order. A rank that assists calls `give` or
// `take` instead. On a machine with streams each call is ordered on `stream`; elsewhere it is over when it returns.
// Threads: one at a time, but `exchange` may run beside another member. Never called with the GIL. A call throws
// MachineError if a rank has died or hangs.
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

/// Describes the ranks that share a home: each has one part of every unit. `rank` and `size` count the ranks of one
/// replica of the model, which may be fewer than all ranks; see engine/engine.h, Note [Shards].
struct Shards {
  int rank = 0;
  int size = 1;
  int num_replicas = 1;
  Bytes bytes_of(Bytes whole) const { return {whole.count / size}; }
  Bytes begin_of(Bytes whole) const { return bytes_of(whole) * rank; }
};

/// Describes an all-gather: one shard of `shard` bytes for each rank of the replica, in rank order. This rank's own
/// shard is filled before, and all shards are filled afterwards.
struct Gather {
  std::byte* all = nullptr;
  Bytes shard;

  /// Returns how many bytes a rank receives from other ranks, at least. It sends the same number.
  Bytes received(const Shards& shards) const { return shard * (shards.size - 1); }
};

/// Holds a set of parameters of one unit: one bit for each parameter, by its number in the unit.
class ParameterSet {
 public:
  explicit ParameterSet(std::size_t num_parameters) : words_((num_parameters + kBits - 1) / kBits, 0) {}
  void add(std::size_t parameter) { words_[parameter / kBits] |= std::int64_t{1} << (parameter % kBits); }
  bool contains(std::size_t parameter) const { return (words_[parameter / kBits] >> (parameter % kBits) & 1) != 0; }
  const std::vector<std::int64_t>& words() const { return words_; }
  /// Adds the parameters of several sets of the same size. Their words lie one set behind the other.
  void add_all(const std::vector<std::int64_t>& words) {
    for (std::size_t i = 0; i < words.size(); ++i) words_[i % words_.size()] |= words[i];
  }

 private:
  static constexpr std::size_t kBits = 32;
  std::vector<std::int64_t> words_;
};

/// Describes a reduce-scatter: one shard of `shard` bytes for each rank of the replica, in rank order. Each element is
/// multiplied by 1 / `Collectives::size` and summed over these ranks, then over those of other replicas with this
/// shard. Afterwards this rank's own shard holds its part of the sum, plus what `add` says. The other shards hold
/// anything.
struct Reduction {
  std::byte* all = nullptr;
  Bytes shard;
  ElementType type = ElementType::fp32;
  std::byte* scratch = nullptr;                    // 4 bytes for each element of `all`, to multiply and sum in fp32
  std::byte* part = nullptr;                       // `shard` bytes, for what `add` brings
  std::vector<std::pair<std::byte*, Bytes>> zero;  // filled with zeros before all else: ranges without a gradient
  std::vector<CopySpan> add;                       // after the sum: adds elements of the home to those in the own shard
  // `arrived`: the parameters whose gradients this rank has. `arrived_anywhere`: those of all ranks are entered there
  // before the ticket is given. Null if the caller does not ask; then null on all ranks.
  std::shared_ptr<const ParameterSet> arrived;
  std::shared_ptr<ParameterSet> arrived_anywhere;

  /// Returns how many bytes a rank receives from other ranks, at least. It sends the same number.
  Bytes received(const Shards& shards) const {
    const bool is_narrow = type == ElementType::fp16 || type == ElementType::bf16;
    const Bytes reduced = shard * (scratch != nullptr && is_narrow ? 2 : 1);
    const std::int64_t across = 2 * reduced.count * (shards.num_replicas - 1) / shards.num_replicas;
    return reduced * (shards.size - 1) + Bytes{across};
  }
};

/// Tells by rank, of all ranks, which want the whole of a unit or have gradients of it. The others assist, and need no
/// memory for the whole unit.
using Wanting = std::vector<bool>;

/// Describes what an assisting rank gives to a gather: its own shard.
struct ShardSend {
  std::vector<std::pair<const std::byte*, Bytes>> own;  // pieces in host memory, which follow each other in the shard
  Bytes shard;
  std::byte* scratch = nullptr;  // `shard` bytes on the device
};

/// Describes what an assisting rank takes from a reduction to which it adds nothing: its shard of the sum.
struct ShardReceive {
  std::byte* to = nullptr;  // in host memory that the device can read
  Bytes shard;
  ElementType type = ElementType::fp32;
  std::byte* scratch = nullptr;              // `shard` bytes on the device
  std::byte* wide = nullptr;                 // 4 bytes for each element: the sum is in fp32; null: it is in `type`
  std::vector<std::pair<Bytes, Bytes>> add;  // ranges of `to` whose content is added to the sum
};

class Collectives {
 public:
  virtual ~Collectives() = default;
  Collectives() = default;
  Collectives(const Collectives&) = delete;  // owns a process group
  Collectives& operator=(const Collectives&) = delete;

  virtual int rank() const = 0;  // of all ranks, not of the replica's
  virtual int size() const = 0;
  virtual Shards shards() const = 0;
  virtual Stream stream() const = 0;

  virtual void gather(const Gather& gathered) = 0;
  virtual void reduce(const Reduction& reduced) = 0;
  // If some ranks assist, they call `give` while the others call `gather_some`, and `take` while they call
  // `reduce_some`.
  virtual void gather_some(const Gather& gathered, const Wanting& wanting) = 0;
  virtual void give(const ShardSend& given, const Wanting& wanting) = 0;
  virtual void reduce_some(const Reduction& reduced) = 0;
  virtual void take(const ShardReceive& taken) = 0;
  /// Returns the numbers of all ranks, by rank, one rank's behind the other. Every rank gives the same count. Over when
  /// the call returns.
  virtual std::vector<std::int64_t> exchange(const std::vector<std::int64_t>& numbers) = 0;
};

}  // namespace noria
