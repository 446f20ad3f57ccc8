#include "plan/itinerary.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace noria {
namespace {

constexpr std::size_t kMostOfASignature = 64;

// Ignores gradients: they arrive after the announcement, so no prediction can use them.
bool is_same_announcement(const Visit& a, const Visit& b) {
  return a.hook == b.hook && a.phase == b.phase && a.needs == b.needs;
}

}  // namespace

std::optional<ItineraryId> ItineraryBook::begin(const Signature& signature) {
  current_signature_ = signature;
  current_.clear();
  expected_.reset();
  is_open_ = true;
  after_update_ = updated_since_previous_;
  if (previous_) {
    const auto found = followed_by_.find({*previous_, after_update_});
    if (found != followed_by_.end() && this->signature(found->second) == signature) expected_ = found->second;
  }
  const auto known = by_signature_.find(signature);
  if (!expected_ && known != by_signature_.end()) expected_ = known->second.back();
  return expected_;
}

std::optional<ItineraryId> ItineraryBook::announce(const Visit& visit) {
  NORIA_INVARIANT(is_open_, "a visit was announced outside of a pass");
  current_.push_back({visit.hook, visit.phase, visit.needs, {}});
  if (!expected_) return expected_;  // no known itinerary begins like this
  const std::vector<Visit>& expected = visits(*expected_);
  if (current_.size() <= expected.size() && is_same_announcement(expected[current_.size() - 1], visit)) {
    return expected_;
  }
  expected_.reset();
  const std::vector<ItineraryId>& known = by_signature_.at(current_signature_);
  for (auto id = known.rbegin(); id != known.rend() && !expected_; ++id) {
    if (begins_like_current(at(*id))) expected_ = *id;
  }
  return expected_;
}

bool ItineraryBook::begins_like_current(const Itinerary& itinerary) const {
  return itinerary.visits.size() >= current_.size() &&
         std::equal(current_.begin(), current_.end(), itinerary.visits.begin(), is_same_announcement);
}

void ItineraryBook::note_gradient(UnitId unit) {
  NORIA_INVARIANT(!current_.empty(), "a gradient arrived before the first visit");
  std::vector<UnitId>& gradients = current_.back().gradients;
  const auto where = std::lower_bound(gradients.begin(), gradients.end(), unit);
  if (where == gradients.end() || *where != unit) gradients.insert(where, unit);
}

ItineraryId ItineraryBook::end() {
  NORIA_INVARIANT(is_open_, "a pass ended that had not begun");
  is_open_ = false;
  std::vector<ItineraryId>& known = by_signature_[current_signature_];
  const auto is_current = [&](ItineraryId id) { return visits(id) == current_; };
  ItineraryId id;
  if (expected_ && is_current(*expected_)) {
    id = *expected_;
  } else if (const auto found = std::find_if(known.rbegin(), known.rend(), is_current); found != known.rend()) {
    id = *found;
  } else {
    id = ItineraryId(next_id_++);
    itineraries_.emplace(id, Itinerary{current_signature_, current_});
  }
  std::erase(known, id);
  known.push_back(id);
  if (known.size() > kMostOfASignature) forget(known.front());
  if (previous_ && itineraries_.contains(*previous_)) {
    followed_by_[{*previous_, after_update_}] = id;
    successors_[*previous_] = {id, after_update_};
  }
  previous_ = id;
  updated_since_previous_ = false;
  current_.clear();
  return id;
}

void ItineraryBook::forget(ItineraryId id) {
  const Signature signature = at(id).signature;
  std::vector<ItineraryId>& known = by_signature_.at(signature);
  std::erase(known, id);
  if (known.empty()) by_signature_.erase(signature);
  itineraries_.erase(id);
  forgotten_.push_back(id);
  std::erase_if(followed_by_, [&](const auto& each) { return each.first.first == id || each.second == id; });
  std::erase_if(successors_, [&](const auto& each) { return each.first == id || each.second.itinerary == id; });
  std::vector<ItineraryId> its_backwards;
  for (const auto& [other, itinerary] : itineraries_) {
    if (itinerary.signature.forward == id) its_backwards.push_back(other);
  }
  for (ItineraryId other : its_backwards) forget(other);
}

std::vector<ItineraryId> ItineraryBook::take_forgotten() { return std::exchange(forgotten_, {}); }

void ItineraryBook::abandon() {
  is_open_ = false;
  current_.clear();
  expected_.reset();
}

void ItineraryBook::note_update() { updated_since_previous_ = true; }

std::optional<ItineraryId> ItineraryBook::expected_after_update() const {
  if (!previous_) return std::nullopt;
  const auto found = followed_by_.find({*previous_, true});
  if (found != followed_by_.end()) return found->second;
  // This was never seen. Most loops run the same forward again.
  const Signature& last = signature(*previous_);
  if (last.phase == Phase::backward && last.forward.valid() && itineraries_.contains(last.forward)) return last.forward;
  return std::nullopt;
}

std::optional<ItineraryBook::Successor> ItineraryBook::successor(ItineraryId id) const {
  const auto found = successors_.find(id);
  if (found == successors_.end()) return std::nullopt;
  return found->second;
}

const ItineraryBook::Itinerary& ItineraryBook::at(ItineraryId id) const {
  const auto found = itineraries_.find(id);
  NORIA_INVARIANT(found != itineraries_.end(), "an itinerary is asked for that was forgotten");
  return found->second;
}

const std::vector<Visit>& ItineraryBook::visits(ItineraryId id) const { return at(id).visits; }

const Signature& ItineraryBook::signature(ItineraryId id) const { return at(id).signature; }

std::vector<Visit> ItineraryBook::all_visits() const {
  std::vector<Visit> visits;
  for (const auto& [id, itinerary] : itineraries_) {
    visits.insert(visits.end(), itinerary.visits.begin(), itinerary.visits.end());
  }
  return visits;
}

}  // namespace noria
