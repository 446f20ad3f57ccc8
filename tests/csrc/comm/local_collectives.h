// Ranks of one process: collectives over plain memory, for tests. A call ends when all ranks have made it.
//
// Order: sums are in the order of the ranks. Threads: one for each rank. A rank that leaves makes the others throw.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "base/errors.h"
#include "comm/collectives.h"

namespace noria {

/// Where ranks meet: `meet` shows all what each brought, until all have left again.
class MeetingPlace {
 public:
  explicit MeetingPlace(int size) : brought_(static_cast<std::size_t>(size)), size_(size) {}

  int size() const { return size_; }

  template <class Act>
  void meet(int rank, const void* brings, Act act) {
    std::unique_lock lock(mutex_);
    brought_[static_cast<std::size_t>(rank)] = brings;
    pass(lock, /*may_end=*/true);
    lock.unlock();
    act(brought_);
    lock.lock();
    pass(lock, /*may_end=*/false);  // others still look at what this rank brought, even if one has left meanwhile
  }

  void leave() {
    const std::lock_guard lock(mutex_);
    is_left_ = true;
    changed_.notify_all();
  }

 private:
  void pass(std::unique_lock<std::mutex>& lock, bool may_end) {
    if (may_end && is_left_) throw MachineError("a rank has died");
    const auto mine = round_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
      return;
    }
    changed_.wait(lock, [&] { return round_ != mine || (may_end && is_left_); });
    if (round_ == mine) throw MachineError("a rank has died");
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<const void*> brought_;
  const int size_;
  int arrived_ = 0;
  std::int64_t round_ = 0;
  bool is_left_ = false;
};

/// Two places, so that one thread may exchange numbers while another gathers or sums.
class LocalGroup {
 public:
  explicit LocalGroup(int size) : bytes_(size), numbers_(size) {}

  int size() const { return bytes_.size(); }
  MeetingPlace& bytes() { return bytes_; }
  MeetingPlace& numbers() { return numbers_; }
  void leave() {
    bytes_.leave();
    numbers_.leave();
  }

 private:
  MeetingPlace bytes_, numbers_;
};

class LocalCollectives : public Collectives {
 public:
  LocalCollectives(std::shared_ptr<LocalGroup> group, int rank) : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  Shards shards() const override { return {rank_, size()}; }
  Stream stream() const override { return {}; }

  void gather(const Gather& gathered) override {
    group_->bytes().meet(rank_, gathered.all, [&](const std::vector<const void*>& brought) {
      for (std::size_t other = 0; other < brought.size(); ++other) {
        if (other == static_cast<std::size_t>(rank_)) continue;
        const auto offset = static_cast<std::int64_t>(other) * gathered.shard.count;
        std::memcpy(gathered.all + offset, static_cast<const std::byte*>(brought[other]) + offset,
                    static_cast<std::size_t>(gathered.shard.count));
      }
    });
  }

  void reduce(const Reduction& reduced) override {
    NORIA_INVARIANT(reduced.type == ElementType::fp32, "only floats are reduced here");
    for (const auto& [memory, bytes] : reduced.zero) std::memset(memory, 0, static_cast<std::size_t>(bytes.count));
    const std::vector<float> sum = sum_of(reduced.all, reduced.shard);
    std::memcpy(reduced.all + rank_ * reduced.shard.count, sum.data(), static_cast<std::size_t>(reduced.shard.count));
    for (const CopySpan& each : reduced.add) {
      auto* to = reinterpret_cast<float*>(each.to);
      const auto* from = reinterpret_cast<const float*>(each.from);
      for (std::int64_t k = 0; k < each.bytes.count / 4; ++k) to[k] += from[k];
    }
  }

  void gather_some(const Gather& gathered, const Wanting& wanting) override {
    meet_for_shards(gathered.all + rank_ * gathered.shard.count, wanting, [&](int other, const void* its) {
      std::memcpy(gathered.all + other * gathered.shard.count, its, static_cast<std::size_t>(gathered.shard.count));
    });
  }

  void give(const ShardSend& given, const Wanting& wanting) override {
    std::byte* to = given.scratch;
    for (const auto& [piece, bytes] : given.own) {
      std::memcpy(to, piece, static_cast<std::size_t>(bytes.count));
      to += bytes.count;
    }
    meet_for_shards(given.scratch, wanting, [](int, const void*) {});
  }

  void reduce_some(const Reduction& reduced) override { reduce(reduced); }

  /// Gradients that no rank has: null, to the rank that sums.
  void take(const ShardReceive& taken) override {
    NORIA_INVARIANT(taken.type == ElementType::fp32 && taken.wide == nullptr, "only floats are reduced here");
    auto* part = reinterpret_cast<float*>(taken.scratch);
    const std::vector<float> sum = sum_of(nullptr, taken.shard);
    std::copy(sum.begin(), sum.end(), part);
    const auto* held = reinterpret_cast<const float*>(taken.to);
    for (const auto& [from, to] : taken.add) {
      for (std::int64_t k = from.count / 4; k < to.count / 4; ++k) part[k] += held[k];
    }
    std::memcpy(taken.to, part, static_cast<std::size_t>(taken.shard.count));
  }

  std::vector<std::int64_t> exchange(const std::vector<std::int64_t>& numbers) override {
    std::vector<std::int64_t> all;
    group_->numbers().meet(rank_, &numbers, [&](const std::vector<const void*>& brought) {
      for (const void* its : brought) {
        const auto& theirs = *static_cast<const std::vector<std::int64_t>*>(its);
        all.insert(all.end(), theirs.begin(), theirs.end());
      }
    });
    return all;
  }

 private:
  std::vector<float> sum_of(const std::byte* all, Bytes shard) {
    const auto count = static_cast<std::size_t>(shard.count) / sizeof(float);
    const auto begin = static_cast<std::size_t>(rank_) * count;
    std::vector<float> sum(count, 0.0F);
    group_->bytes().meet(rank_, all, [&](const std::vector<const void*>& brought) {
      for (const void* its : brought) {
        for (std::size_t i = 0; i < count && its != nullptr; ++i) {
          sum[i] += static_cast<const float*>(its)[begin + i] / static_cast<float>(size());
        }
      }
    });
    return sum;
  }

  /// One meeting for each rank that wants them, as a gather to one rank is.
  template <class Copy>
  void meet_for_shards(const std::byte* own, const Wanting& wanting, Copy copy) {
    for (int root = 0; root < size(); ++root) {
      if (!wanting[static_cast<std::size_t>(root)]) continue;
      group_->bytes().meet(rank_, own, [&](const std::vector<const void*>& brought) {
        for (int other = 0; root == rank_ && other < size(); ++other) {
          if (other != rank_) copy(other, brought[static_cast<std::size_t>(other)]);
        }
      });
    }
  }

  const std::shared_ptr<LocalGroup> group_;
  const int rank_;
};

}  // namespace noria
