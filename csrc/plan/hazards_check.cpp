// Proves a list of waits. It uses nothing that `hazards` is made of, so that one can judge the other.
#include <algorithm>
#include <array>

#include "base/errors.h"
#include "plan/hazards.h"

namespace noria {
namespace {

std::string text_of(const std::vector<Op>& ops, std::size_t i) {
  const Op& op = ops[i];
  std::string text = "op " + std::to_string(i) + " (" + std::string(to_string(op.verb));
  if (op.unit.valid()) text += " of unit " + std::to_string(op.unit.value);
  return text + ")";
}

bool overlap(const Buffer& a, const Buffer& b) {
  return a.place == b.place && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
}

bool is_write(const Access& access) { return access.mode == Access::Mode::write; }

class Proof {
 public:
  Proof(const std::vector<Op>& ops, const WaitList& waits, const BufferTable& buffers)
      : ops_(ops),
        waits_(waits),
        buffers_(buffers),
        before_(ops.size()) {}

  std::vector<std::string> run() {
    NORIA_INVARIANT(waits_.waits.size() == ops_.size(), "the list of waits is not of these ops");
    add_edges();
    if (faults_.empty()) sort();
    if (faults_.empty()) check_pairs();
    check_versions();
    return faults_;
  }

 private:
  void add_edges() {
    std::array<std::int64_t, kNumLanes> last_on_lane;
    last_on_lane.fill(-1);
    const auto num_ops = static_cast<std::int64_t>(ops_.size());
    for (std::int64_t i = 0; i < num_ops; ++i) {
      const Op& op = ops_[static_cast<std::size_t>(i)];
      auto& before = before_[static_cast<std::size_t>(i)];
      for (const std::int64_t wait : waits_.waits[static_cast<std::size_t>(i)]) {
        if (wait < 0 || wait >= num_ops || ops_[static_cast<std::size_t>(wait)].verb == Verb::evict) {
          faults_.push_back(text_of(ops_, static_cast<std::size_t>(i)) + " waits for op " + std::to_string(wait) +
                            ", which never ends");
          continue;
        }
        const Op& giver = ops_[static_cast<std::size_t>(wait)];
        if (wait >= i && op.lane == giver.lane && op.lane != Lane::update) {
          faults_.push_back(text_of(ops_, static_cast<std::size_t>(i)) + " waits for " +
                            text_of(ops_, static_cast<std::size_t>(wait)) + ", which is queued behind it on lane " +
                            std::string(to_string(op.lane)));
        }
        before.push_back(static_cast<std::size_t>(wait));
      }
      if (op.verb == Verb::evict || op.lane == Lane::update) continue;
      auto& last = last_on_lane.at(static_cast<std::size_t>(op.lane));
      if (last >= 0) before.push_back(static_cast<std::size_t>(last));
      last = i;
    }
  }

  // Sorts ops so that each comes after all that must end before it. Ops that remain lie on a circle, or behind one.
  void sort() {
    std::vector<std::size_t> num_open(ops_.size());
    std::vector<std::vector<std::size_t>> after(ops_.size());
    std::vector<std::size_t> ready;
    for (std::size_t i = 0; i < ops_.size(); ++i) {
      num_open[i] = before_[i].size();
      for (std::size_t b : before_[i]) after[b].push_back(i);
      if (num_open[i] == 0) ready.push_back(i);
    }
    while (!ready.empty()) {
      const std::size_t i = ready.back();
      ready.pop_back();
      order_.push_back(i);
      for (std::size_t a : after[i]) {
        if (--num_open[a] == 0) ready.push_back(a);
      }
    }
    if (order_.size() == ops_.size()) return;
    std::size_t at = 0;
    while (num_open[at] == 0) ++at;
    std::vector<std::size_t> path;  // back along open ops, until it meets one again
    while (std::find(path.begin(), path.end(), at) == path.end()) {
      path.push_back(at);
      at = *std::find_if(before_[at].begin(), before_[at].end(), [&](std::size_t b) { return num_open[b] > 0; });
    }
    path.erase(path.begin(), std::find(path.begin(), path.end(), at));
    std::string text = text_of(ops_, at);
    for (std::size_t k = 1; k < path.size(); ++k) text += ", which waits for " + text_of(ops_, path[k]);
    faults_.push_back("a circle: " + text + ", which waits for " + text_of(ops_, at));
  }

  void check_pairs() {
    const std::size_t num_words = (ops_.size() + 63) / 64;
    std::vector<std::vector<std::uint64_t>> ended(ops_.size(), std::vector<std::uint64_t>(num_words));
    for (std::size_t i : order_) {
      for (std::size_t b : before_[i]) {
        for (std::size_t word = 0; word < num_words; ++word) ended[i][word] |= ended[b][word];
        ended[i][b / 64] |= std::uint64_t{1} << (b % 64);
      }
    }
    for (std::size_t j = 0; j < ops_.size(); ++j) {
      for (std::size_t i = 0; i < j; ++i) {
        if ((ended[j][i / 64] >> (i % 64) & 1) != 0) continue;
        if (const Buffer* shared = conflict(ops_[i], ops_[j])) {
          faults_.push_back("nothing orders " + text_of(ops_, i) + " before " + text_of(ops_, j) + ", which uses the " +
                            std::string(to_string(shared->purpose)) + " of unit " + std::to_string(shared->unit.value));
        }
      }
    }
  }

  const Buffer* conflict(const Op& earlier, const Op& later) const {
    if (earlier.verb == Verb::evict || later.verb == Verb::evict) return nullptr;
    for (const Access& a : earlier.accesses) {
      for (const Access& b : later.accesses) {
        if ((is_write(a) || is_write(b)) && overlap(buffers_[a.buffer], buffers_[b.buffer])) return &buffers_[b.buffer];
      }
    }
    return nullptr;
  }

  // Checks what each read sees: the last write that was issued before it and overlaps it. That write must be to the
  // same buffer, and of the version that the read names.
  void check_versions() {
    for (std::size_t j = 0; j < ops_.size(); ++j) {
      if (ops_[j].verb == Verb::evict) continue;
      for (const Access& read : ops_[j].accesses) {
        if (!is_write(read)) check_version(j, read);
      }
    }
  }

  void check_version(std::size_t reader, const Access& read) {
    for (std::size_t i = reader; i-- > 0;) {
      if (ops_[i].verb == Verb::evict) continue;
      for (const Access& write : ops_[i].accesses) {
        if (!is_write(write) || !overlap(buffers_[write.buffer], buffers_[read.buffer])) continue;
        if (write.buffer == read.buffer && write.version == read.version) return;
        faults_.push_back(text_of(ops_, reader) + " expects version " + std::to_string(read.version) + " of the " +
                          std::string(to_string(buffers_[read.buffer].purpose)) + " of unit " +
                          std::to_string(buffers_[read.buffer].unit.value) + ", but " + text_of(ops_, i) +
                          (write.buffer == read.buffer ? " made version " + std::to_string(write.version)
                                                       : " wrote something else over it"));
        return;
      }
    }
  }

  const std::vector<Op>& ops_;
  const WaitList& waits_;
  const BufferTable& buffers_;
  std::vector<std::vector<std::size_t>> before_;  // by op: the ops that end before it starts
  std::vector<std::size_t> order_;
  std::vector<std::string> faults_;
};

}  // namespace

std::vector<std::string> check(const std::vector<Op>& ops, const WaitList& waits, const BufferTable& buffers) {
  return Proof(ops, waits, buffers).run();
}

}  // namespace noria
