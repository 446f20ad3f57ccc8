#include "plan/placement.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "base/errors.h"

namespace noria {
namespace {

constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

class Placer {
 public:
  Placer(const PlanRequest& request, const UnitMap<UnitFacts>& units)
      : request_(request),
        units_(units),
        pieces_{{Bytes{0}, request.budget.arena, kNone, -1}},
        lying_(units.size(), kNone),
        last_free_(units.size(), -1),
        needed_at_(units.size(), -1),
        uses_(units.size()) {
    std::int64_t time = 0;
    for (const auto* visits : {&request.visits, &request.next_visits}) {
      for (const Visit& visit : *visits) {
        for (UnitId unit : visit.needs) uses_[unit].push_back(time);
        ++time;
      }
    }
    for (const Resident& resident : request.entry) {
      const Bytes bytes = units[resident.unit].weights;
      NORIA_INVARIANT(lying_[resident.unit] == kNone && resident.offset >= Bytes{0} &&
                          align_up(resident.offset, kTensorAlignment) == resident.offset &&
                          resident.offset + align_up(bytes, kTensorAlignment) <= request.budget.arena &&
                          is_hole(resident.offset, bytes),
                      "unit " + units[resident.unit].name + " lies where it cannot lie at entry");
      take(resident.offset, resident.unit, true, -1);
    }
  }

  std::vector<Stay> run() {
    for (now_ = 0; now_ < num_visits(); ++now_) {
      const Visit& visit = request_.visits[static_cast<std::size_t>(now_)];
      for (UnitId unit : visit.needs) needed_at_[unit] = now_;
      if (!place_missing(visit)) place_all_anew(visit);
      for (UnitId unit : visit.needs) stays_[lying_[unit]].free_at = now_ + 1;
      for (Piece& piece : pieces_) {
        if (piece.stay != kNone && !stays_[piece.stay].is_weights)
          piece = {piece.offset, piece.end, kNone, now_ + 1, true};
      }
    }
    return std::move(stays_);
  }

 private:
  // The arena is cut into pieces without gaps. A piece is a stay, or a hole that remembers when and from what it became
  // free.
  struct Piece {
    Bytes offset;
    Bytes end;
    std::size_t stay;
    std::int64_t free_at;
    bool was_drained = false;  // a gradient buffer lay there last; its drain only begins at `free_at`
  };

  std::int64_t free_at(const Piece& piece) const {
    return piece.stay == kNone ? piece.free_at : stays_[piece.stay].free_at;
  }

  std::int64_t num_visits() const { return static_cast<std::int64_t>(request_.visits.size()); }

  std::int64_t next_use(UnitId unit) const {
    const auto& uses = uses_[unit];
    const auto next = std::upper_bound(uses.begin(), uses.end(), now_);
    return next == uses.end() ? kNever : *next;
  }

  bool is_pinned(const Piece& piece) const {
    if (piece.stay == kNone) return false;
    const Stay& stay = stays_[piece.stay];
    return !stay.is_weights || needed_at_[stay.unit] == now_;
  }

  Bytes bytes_of(UnitId unit, bool is_weights) const {
    const UnitFacts& facts = units_[unit];
    const Bytes bytes = is_weights ? facts.weights : facts.gradients;
    NORIA_INVARIANT(bytes > Bytes{0}, "unit " + facts.name + " has no " + (is_weights ? "weights" : "gradients"));
    return bytes;
  }

  std::size_t piece_at(Bytes offset) const {
    const auto after = std::upper_bound(pieces_.begin(), pieces_.end(), offset,
                                        [](Bytes value, const Piece& piece) { return value < piece.offset; });
    return static_cast<std::size_t>(after - pieces_.begin()) - 1;
  }

  bool is_hole(Bytes offset, Bytes bytes) const {
    for (std::size_t i = piece_at(offset); i < pieces_.size() && pieces_[i].offset < offset + bytes; ++i) {
      if (pieces_[i].stay != kNone) return false;
    }
    return true;
  }

  // Chooses a range: see Note [Choosing a range]. Memory that was free before `earliest` is no better than memory free
  // since then. Returns none if every range touches something that the visit needs.
  std::optional<Bytes> choose(Bytes bytes, std::int64_t earliest, bool is_weights) const {
    using Score = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // smaller is better
    std::optional<Bytes> best;
    Score best_score;
    for (std::size_t first = 0; first < pieces_.size(); ++first) {
      const Bytes end = pieces_[first].offset + bytes;
      std::int64_t soonest_use = kNever;
      std::int64_t ready_at = 2 * earliest;  // in halves of an opening, so that a drain counts as one half
      Bytes lost;
      Bytes reached = pieces_[first].offset;
      for (std::size_t i = first; i < pieces_.size() && reached < end && !is_pinned(pieces_[i]); ++i) {
        const Piece& piece = pieces_[i];
        reached = piece.end;
        ready_at = std::max(ready_at, 2 * free_at(piece) + (piece.was_drained ? 1 : 0));
        if (!is_weights && piece.was_drained && free_at(piece) == now_)
          soonest_use = std::min(soonest_use, num_visits());
        if (piece.stay == kNone) continue;
        const std::int64_t use = next_use(stays_[piece.stay].unit);
        soonest_use = std::min(soonest_use, use);
        if (use != kNever) lost += stays_[piece.stay].bytes;
      }
      if (reached < end) continue;
      const Score score{-soonest_use, lost.count, ready_at};
      if (!best || score < best_score) {
        best = pieces_[first].offset;
        best_score = score;
      }
    }
    return best;
  }

  void give_up(std::size_t index) {
    Stay& stay = stays_[index];
    stay.given_up_at = num_fetches_;
    last_free_[stay.unit] = stay.free_at;
    lying_[stay.unit] = kNone;
    --num_lying_;
    Piece& piece = pieces_[piece_at(stay.offset)];
    piece.stay = kNone;
    piece.free_at = stay.free_at;
    given_up_.push_back(index);
  }

  // Gives up the stays in the range, and leases it. Returns the opening from which it may be written.
  std::int64_t take(Bytes offset, UnitId unit, bool is_weights, std::int64_t visit) {
    const Bytes bytes = bytes_of(unit, is_weights);
    const Bytes end = offset + align_up(bytes, kTensorAlignment);
    std::int64_t ready_at = is_weights ? last_free_[unit] : -1;
    const std::size_t first = piece_at(offset);
    std::size_t last = first;
    for (; last < pieces_.size() && pieces_[last].offset < end; ++last) {
      ready_at = std::max(ready_at, free_at(pieces_[last]));
      if (pieces_[last].stay != kNone) give_up(pieces_[last].stay);
    }
    std::vector<Piece> cut;
    const Piece before = pieces_[first];
    const Piece after = pieces_[last - 1];
    if (before.offset < offset) cut.push_back({before.offset, offset, kNone, before.free_at, before.was_drained});
    cut.push_back({offset, end, stays_.size(), -1});
    if (end < after.end) cut.push_back({end, after.end, kNone, after.free_at, after.was_drained});
    pieces_.erase(pieces_.begin() + static_cast<std::ptrdiff_t>(first),
                  pieces_.begin() + static_cast<std::ptrdiff_t>(last));
    pieces_.insert(pieces_.begin() + static_cast<std::ptrdiff_t>(first), cut.begin(), cut.end());
    if (is_weights) {
      lying_[unit] = stays_.size();
      ++num_lying_;
      if (visit >= 0) ++num_fetches_;
    }
    stays_.push_back({unit, is_weights, offset, bytes, visit, visit < 0 ? -1 : visit + 1, ready_at, kNever});
    return ready_at;
  }

  // Gives up units until the cap on leases allows one more; free memory does not help here. Returns the opening at
  // which the last of them is free.
  std::int64_t make_room_in_window() {
    std::int64_t free_at = -1;
    while (request_.budget.window > 0 && num_lying_ >= request_.budget.window) {
      std::size_t victim = kNone;
      std::pair<std::int64_t, std::int64_t> best;
      for (UnitId unit : units_.ids()) {
        if (lying_[unit] == kNone || needed_at_[unit] == now_) continue;
        const std::pair score{next_use(unit), -stays_[lying_[unit]].free_at};
        if (victim == kNone || score > best) {
          victim = lying_[unit];
          best = score;
        }
      }
      NORIA_INVARIANT(victim != kNone, "the window is full of what one visit needs");
      free_at = std::max(free_at, stays_[victim].free_at);
      give_up(victim);
    }
    return free_at;
  }

  // Places what the visit needs and the arena lacks. Units in the arena keep their places. Returns false, with nothing
  // changed, if they are in the way.
  bool place_missing(const Visit& visit) {
    const auto lies = [&](UnitId unit) { return lying_[unit] != kNone; };
    if (visit.gradients.empty() && std::all_of(visit.needs.begin(), visit.needs.end(), lies)) return true;
    const std::vector<Piece> pieces = pieces_;
    const std::size_t num_stays = stays_.size();
    const std::int64_t num_fetches = num_fetches_;
    const std::int64_t issued = issued_;
    given_up_.clear();
    const auto place_one = [&](UnitId unit, bool is_weights) {
      std::int64_t earliest = -1;
      if (is_weights) earliest = std::max({issued_, last_free_[unit], make_room_in_window()});
      const auto offset = choose(align_up(bytes_of(unit, is_weights), kTensorAlignment), earliest, is_weights);
      if (!offset) return false;
      const std::int64_t ready_at = take(*offset, unit, is_weights, now_);
      if (is_weights) issued_ = std::max(earliest, ready_at);
      return true;
    };
    bool placed = true;
    for (UnitId unit : visit.needs) placed = placed && (lies(unit) || place_one(unit, true));
    for (UnitId unit : visit.gradients) placed = placed && place_one(unit, false);
    if (placed) return true;

    for (std::size_t i = num_stays; i < stays_.size(); ++i) {
      if (!stays_[i].is_weights) continue;
      lying_[stays_[i].unit] = kNone;
      --num_lying_;
    }
    for (std::size_t index : given_up_) {  // all are older stays: a visit never gives up what it needs itself
      stays_[index].given_up_at = kNever;
      lying_[stays_[index].unit] = index;
      ++num_lying_;
    }
    stays_.resize(num_stays);
    pieces_ = pieces;
    num_fetches_ = num_fetches;
    issued_ = issued;
    return false;
  }

  // Places all that the visit needs side by side from offset 0. This is legal at any time, because copies on the device
  // are clean.
  void place_all_anew(const Visit& visit) {
    std::vector<std::tuple<UnitId, bool, Bytes>> targets;
    Bytes offset;
    const auto add = [&](UnitId unit, bool is_weights) {
      targets.emplace_back(unit, is_weights, offset);
      offset += align_up(bytes_of(unit, is_weights), kTensorAlignment);
    };
    for (UnitId unit : visit.needs) add(unit, true);
    for (UnitId unit : visit.gradients) add(unit, false);
    const auto stays_put = [&](UnitId unit, Bytes target) {
      return lying_[unit] != kNone && stays_[lying_[unit]].offset == target;
    };
    for (const auto& [unit, is_weights, target] : targets) {
      if (is_weights && lying_[unit] != kNone && !stays_put(unit, target)) give_up(lying_[unit]);
    }
    for (const auto& [unit, is_weights, target] : targets) {
      if (is_weights && stays_put(unit, target)) continue;
      std::int64_t earliest = is_weights ? std::max(issued_, make_room_in_window()) : -1;
      earliest = std::max(earliest, take(target, unit, is_weights, now_));
      if (is_weights) issued_ = earliest;
    }
  }

  const PlanRequest& request_;
  const UnitMap<UnitFacts>& units_;
  std::vector<Stay> stays_;
  std::vector<Piece> pieces_;
  UnitMap<std::size_t> lying_;               // its current stay
  UnitMap<std::int64_t> last_free_;          // when its last given-up stay became free
  UnitMap<std::int64_t> needed_at_;          // the last visit that needed it
  UnitMap<std::vector<std::int64_t>> uses_;  // the visits that need it, the next pass's following this one's
  std::vector<std::size_t> given_up_;        // since the last attempt to place a visit began
  std::int64_t now_ = -1;                    // the visit being placed
  std::int64_t num_fetches_ = 0;
  std::int64_t issued_ = -1;  // the opening at which the last fetch could be issued
  std::int32_t num_lying_ = 0;
};

}  // namespace

std::vector<Stay> place(const PlanRequest& request, const UnitMap<UnitFacts>& units) {
  return Placer(request, units).run();
}

}  // namespace noria
