// The visits of a pass in order, recorded at its first occurrence and known again at the next.
//
// A pass is begun with a signature, which says what is known before its first visit; itineraries of one signature
// (another branch, another number of layers) are told apart as their visits are announced. The book predicts, the
// engine follows as long as the prediction holds, and what really happened is what is kept. Of one signature the newest
// 64 are kept; older ones are forgotten, with the backward passes that belong to them, and learnt again: a loop that
// never repeats itself fills no memory.
//
// Threads: the caller serialises.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "plan/plan.h"

namespace noria {

using ItineraryId = Id<struct ItineraryTag>;

struct Signature {
  Phase phase = Phase::forward;
  std::int32_t root = 0;  // which model of the wrap call
  bool grad_enabled = true;
  bool training = true;
  bool accumulating = false;  // held gradients will be added to
  ItineraryId forward;        // of a backward pass: the last forward's itinerary
  auto operator<=>(const Signature&) const = default;
};

class ItineraryBook {
 public:
  /// Begins a pass. Returns the itinerary it is expected to follow: the one that followed the same predecessor last
  /// time, else the newest of that signature, else none.
  std::optional<ItineraryId> begin(const Signature& signature);

  /// The next visit as announced (gradients empty). Same id: as expected. Another id: a known itinerary with the same
  /// beginning was found. None: unknown from here on.
  std::optional<ItineraryId> announce(const Visit& visit);

  /// A gradient of `unit` arrived during the current visit.
  void note_gradient(UnitId unit);

  /// Ends the pass and keeps what happened, under a new id if it is new. The expected id stands if it was exact.
  ItineraryId end();
  /// Forgets the pass that was begun (it raised).
  void abandon();

  /// An update happened between two passes: part of what "followed" means.
  void note_update();

  /// What followed this itinerary last time, and whether an update lay between.
  struct Successor {
    ItineraryId itinerary;
    bool after_update = false;
  };
  std::optional<Successor> successor(ItineraryId id) const;

  /// The pass expected next if an update comes (or came) first: what followed this predecessor and an update last time,
  /// else, after a backward pass, the forward it belonged to.
  std::optional<ItineraryId> expected_after_update() const;

  /// InvariantError for one that is forgotten.
  const std::vector<Visit>& visits(ItineraryId id) const;
  const Signature& signature(ItineraryId id) const;
  /// What was forgotten since the last call.
  std::vector<ItineraryId> take_forgotten();
  std::size_t size() const { return itineraries_.size(); }

  /// How far the current pass has come: index of the visit last announced, -1 before the first.
  std::int64_t position() const { return static_cast<std::int64_t>(current_.size()) - 1; }

 private:
  struct Itinerary {
    Signature signature;
    std::vector<Visit> visits;
  };
  const Itinerary& at(ItineraryId id) const;
  bool begins_like_current(const Itinerary& itinerary) const;
  void forget(ItineraryId id);

  std::map<ItineraryId, Itinerary> itineraries_;
  std::int32_t next_id_ = 0;
  std::vector<ItineraryId> forgotten_;
  std::map<Signature, std::vector<ItineraryId>> by_signature_;       // newest last
  std::map<std::pair<ItineraryId, bool>, ItineraryId> followed_by_;  // (predecessor, update between) -> successor
  std::map<ItineraryId, Successor> successors_;
  std::optional<ItineraryId> previous_;  // the last pass that ended
  bool updated_since_previous_ = false;
  bool is_open_ = false;  // a pass has begun; what follows belongs to it
  bool after_update_ = false;
  Signature current_signature_;
  std::vector<Visit> current_;
  std::optional<ItineraryId> expected_;
};

}  // namespace noria
