#include "plan/hazards.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/errors.h"

namespace noria {
namespace {

// Returns the chain of an op: its FIFO lane, the updates of its unit, or the sums of its unit. Ops of one chain end in
// issue order.
std::size_t chain_of(const Op& op) {
  if (op.lane != Lane::update) return static_cast<std::size_t>(op.lane);
  const std::size_t of_unit = 2 * static_cast<std::size_t>(op.unit.value) + (op.verb == Verb::sum ? 1 : 0);
  return static_cast<std::size_t>(kNumLanes) + of_unit;
}

std::string text_of(const Op& op) { return std::string(to_string(op.verb)) + " op " + std::to_string(op.id.value); }

using Clock = std::vector<std::int64_t>;  // by chain: the newest op that has ended by then; -1: none

std::int64_t at(const Clock& clock, std::size_t chain) { return chain < clock.size() ? clock[chain] : -1; }

void raise_to(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size(), -1);
  for (std::size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

using Past = std::size_t;  // index of a remembered op
constexpr Past kNoOp = static_cast<Past>(-1);

// Holds the ops that a later op may have to wait for, each with the clock of its end. References are counted: an op is
// forgotten when no range names it any more, and its memory is used again.
class PastOps {
 public:
  struct Entry {
    OpId id;
    Verb verb = Verb::fetch;
    std::size_t chain = 0;
    std::int64_t num_references = 0;
    Clock clock;
  };

  const Entry& operator[](Past past) const { return entries_[past]; }
  std::size_t size() const { return entries_.size() - free_.size(); }

  /// Returns the op with one reference, which the caller owns.
  Past add(OpId id, Verb verb, std::size_t chain, const Clock& clock) {
    if (free_.empty()) {
      free_.push_back(entries_.size());
      entries_.emplace_back();
    }
    const Past past = free_.back();
    free_.pop_back();
    Entry& entry = entries_[past];
    entry.id = id;
    entry.verb = verb;
    entry.chain = chain;
    entry.num_references = 1;
    entry.clock.assign(clock.begin(), clock.end());
    return past;
  }
  Past hold(Past past) {
    if (past != kNoOp) ++entries_[past].num_references;
    return past;
  }
  void drop(Past past) {
    if (past != kNoOp && --entries_[past].num_references == 0) free_.push_back(past);
  }

 private:
  std::vector<Entry> entries_;
  std::vector<Past> free_;
};

// Holds the bytes of one place, cut wherever an access began or ended. A write that covers several pieces joins them
// again.
class RangeMap {
 public:
  struct Range {
    std::int64_t end = 0;
    Past writer = kNoOp;
    std::vector<Past> readers;  // since the last write, the newest of each chain
  };

  explicit RangeMap(PastOps& ops) : ops_(&ops) {}
  std::size_t size() const { return ranges_.size(); }

  template <class Visitor>
  void for_each_overlapping(std::int64_t begin, std::int64_t end, Visitor visit) const {
    auto it = ranges_.upper_bound(begin);
    if (it != ranges_.begin() && std::prev(it)->second.end > begin) --it;
    for (; it != ranges_.end() && it->first < end; ++it) visit(it->second);
  }

  void read(std::int64_t begin, std::int64_t end, Past op) {
    split(begin);
    split(end);
    std::int64_t covered = begin;
    for (auto it = ranges_.lower_bound(begin); covered < end; ++it) {
      if (it == ranges_.end() || it->first > covered) {  // never touched so far
        const std::int64_t gap_end = it == ranges_.end() ? end : std::min(end, it->first);
        it = ranges_.emplace_hint(it, covered, Range{gap_end, kNoOp, {}});
      }
      add_reader(it->second, op);
      covered = it->second.end;
    }
  }

  void write(std::int64_t begin, std::int64_t end, Past op) {
    split(begin);
    split(end);
    const auto first = ranges_.lower_bound(begin);
    auto last = first;
    for (; last != ranges_.end() && last->first < end; ++last) clear(last->second);
    if (first == last) {
      ranges_.emplace_hint(first, begin, Range{end, ops_->hold(op), {}});
    } else if (first->first == begin) {  // the usual case: the same range as in the last write
      ranges_.erase(std::next(first), last);
      first->second.end = end;
      first->second.writer = ops_->hold(op);
    } else {
      ranges_.erase(first, last);
      ranges_.emplace(begin, Range{end, ops_->hold(op), {}});
    }
  }

 private:
  void split(std::int64_t where) {
    auto it = ranges_.upper_bound(where);
    if (it == ranges_.begin()) return;
    --it;
    if (it->first == where || it->second.end <= where) return;
    Range upper = it->second;
    ops_->hold(upper.writer);
    for (Past reader : upper.readers) ops_->hold(reader);
    it->second.end = where;
    ranges_.emplace_hint(std::next(it), where, std::move(upper));
  }

  void add_reader(Range& range, Past op) {
    ops_->hold(op);
    for (Past& reader : range.readers) {
      if ((*ops_)[reader].chain != (*ops_)[op].chain) continue;
      ops_->drop(std::exchange(reader, op));
      return;
    }
    range.readers.push_back(op);
  }

  void clear(Range& range) {
    ops_->drop(range.writer);
    for (Past reader : range.readers) ops_->drop(reader);
    range.writer = kNoOp;
    range.readers.clear();
  }

  PastOps* ops_;
  std::map<std::int64_t, Range> ranges_;  // by first byte
};

}  // namespace

std::string kind_of(const Wait& wait, Verb waiter) {
  static constexpr const char* kRules[] = {"RAW", "WAW", "WAR"};
  return std::string(to_string(wait.giver)) + " -> " + std::string(to_string(waiter)) + " on " +
         std::string(to_string(wait.purpose)) + " (" + kRules[static_cast<std::size_t>(wait.rule)] + ")";
}

struct Hazards::State {
  struct Candidate {
    Past past;
    Rule rule;
    Purpose purpose;
  };

  State(const BufferTable& table, bool may_assist) : buffers(table), assists(may_assist) {}

  RangeMap& ranges_of(const Place& place) {
    for (auto& [known, ranges] : places) {
      if (known == place) return ranges;
    }
    return places.emplace_back(place, RangeMap(ops)).second;
  }

  void collect(const Access& access) {
    const Buffer& buffer = buffers[access.buffer];
    ranges_of(buffer.place)
        .for_each_overlapping(
            buffer.offset.count, (buffer.offset + buffer.bytes).count, [&](const RangeMap::Range& range) {
              const bool writes = access.mode == Access::Mode::write;
              if (range.writer != kNoOp) {
                candidates.push_back(
                    {range.writer, writes ? Rule::write_after_write : Rule::read_after_write, buffer.purpose});
              }
              if (!writes) return;
              for (Past reader : range.readers) {
                candidates.push_back({reader, Rule::write_after_read, buffer.purpose});
              }
            });
  }

  // See Note [Assistance].
  void collect_assistance(const Access& access) {
    const Purpose purpose = buffers[access.buffer].purpose;
    const bool writes = access.mode == Access::Mode::write;
    if (collecting == kNoOp) return;
    if (purpose == Purpose::working_copy && writes) candidates.push_back({collecting, Rule::write_after_read, purpose});
    if (purpose != Purpose::held_gradient) return;
    candidates.push_back({collecting, writes ? Rule::write_after_write : Rule::read_after_write, purpose});
  }

  const BufferTable& buffers;
  const bool assists;
  PastOps ops;
  Past collecting = kNoOp;  // the newest op of the collect lane
  std::vector<std::pair<Place, RangeMap>> places;
  std::vector<Clock> chain_clocks;  // by chain: the clock of its last op; empty: none yet
  OpId newest;
  std::string omitted;
  std::vector<Candidate> candidates;  // kept for its memory
  Clock clock;                        // kept for its memory
};

Hazards::Hazards(const BufferTable& buffers, bool assists) : state_(std::make_unique<State>(buffers, assists)) {}
Hazards::~Hazards() = default;

std::vector<Wait> Hazards::issue(const Op& op) {
  State& state = *state_;
  if (op.verb == Verb::evict) return {};
  NORIA_INVARIANT(op.id > state.newest, text_of(op) + " after op " + std::to_string(state.newest.value));
  state.newest = op.id;

  auto& candidates = state.candidates;
  candidates.clear();
  for (const Access& access : op.accesses) {
    state.collect(access);
    if (state.assists && op.lane != Lane::collect) state.collect_assistance(access);
  }
  // Newest first, because an op implies only older ones. Several rules may find the same op. Then RAW names the wait,
  // because it says most.
  std::sort(candidates.begin(), candidates.end(), [&](const auto& a, const auto& b) {
    return std::pair(state.ops[b.past].id, a.rule) < std::pair(state.ops[a.past].id, b.rule);
  });

  const std::size_t chain = chain_of(op);
  if (state.chain_clocks.size() <= chain) state.chain_clocks.resize(chain + 1);
  Clock& chain_clock = state.chain_clocks[chain];
  Clock& clock = state.clock;
  if (op.lane == Lane::update) clock.clear();  // no lane orders its ops
  else clock.assign(chain_clock.begin(), chain_clock.end());

  std::vector<Wait> waits;
  for (const State::Candidate& candidate : candidates) {
    const PastOps::Entry& past = state.ops[candidate.past];
    if (at(clock, past.chain) >= past.id.value) continue;
    raise_to(clock, past.clock);
    const Wait wait{past.id, candidate.rule, past.verb, candidate.purpose};
    if (state.omitted.empty() || kind_of(wait, op.verb) != state.omitted) waits.push_back(wait);
  }
  NORIA_INVARIANT(at(clock, chain) == at(chain_clock, chain),
                  text_of(op) + " does not conflict with the update of the same unit before it");

  if (clock.size() <= chain) clock.resize(chain + 1, -1);
  clock[chain] = op.id.value;
  chain_clock.assign(clock.begin(), clock.end());
  const Past past = state.ops.add(op.id, op.verb, chain, clock);
  for (const Access::Mode mode : {Access::Mode::read, Access::Mode::write}) {  // writes last: they are what counts
    for (const Access& access : op.accesses) {
      if (access.mode != mode) continue;
      const Buffer& buffer = state.buffers[access.buffer];
      if (buffer.bytes == Bytes{0}) continue;
      RangeMap& ranges = state.ranges_of(buffer.place);
      if (mode == Access::Mode::read) ranges.read(buffer.offset.count, (buffer.offset + buffer.bytes).count, past);
      else ranges.write(buffer.offset.count, (buffer.offset + buffer.bytes).count, past);
    }
  }
  if (op.lane == Lane::collect) state.ops.drop(std::exchange(state.collecting, state.ops.hold(past)));
  state.ops.drop(past);
  return waits;
}

std::vector<OpId> Hazards::before(const Access& access) const {
  State& state = *state_;
  state.candidates.clear();
  state.collect(access);
  std::vector<OpId> found;
  for (const State::Candidate& candidate : state.candidates) found.push_back(state.ops[candidate.past].id);
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

void Hazards::omit(const std::string& kind) { state_->omitted = kind; }

std::size_t Hazards::num_remembered() const {
  std::size_t count = state_->ops.size();
  for (const auto& [place, ranges] : state_->places) count += ranges.size();
  return count;
}

WaitList derive(const std::vector<Op>& ops, const BufferTable& buffers) {
  Hazards hazards(buffers, /*assists=*/false);
  WaitList list;
  list.waits.resize(ops.size());
  for (std::size_t i = 0; i < ops.size(); ++i) {
    Op op = ops[i];
    op.id = OpId(static_cast<std::int64_t>(i));
    for (const Wait& wait : hazards.issue(op)) list.waits[i].push_back(wait.on.value);
  }
  return list;
}

}  // namespace noria
