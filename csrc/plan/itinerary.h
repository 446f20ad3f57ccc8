// Records the visits of a pass in order when the pass first occurs, and recognises the pass when it occurs again.
//
// A pass begins with a signature: what is known before its first visit. Itineraries of one signature may differ, for
// example by a branch or by the number of layers. The book tells them apart as their visits are announced. The book
// predicts, the engine follows as long as the prediction holds, and the book keeps what really happened.
//
// For each signature the 64 itineraries that occurred last are kept. Others are forgotten, with the backward passes
// that belong to them, and learnt again if they return. So a loop that never repeats itself does not fill memory.
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
  bool accumulating = false;  // the pass adds to held gradients
  ItineraryId forward;        // backward passes only: the last forward's itinerary
  auto operator<=>(const Signature&) const = default;
};

class ItineraryBook {
 public:
  /// Begins a pass. Returns the itinerary that the pass is expected to follow. That is the one that followed the same
  /// predecessor last time, else the one of this signature that occurred last, else none.
  std::optional<ItineraryId> begin(const Signature& signature);

  /// Takes the next visit as announced (without its gradients, which come later). Returns the same id as before if the
  /// visit was expected. Else returns the latest one of this signature that begins like this pass, or none until the
  /// pass ends.
  std::optional<ItineraryId> announce(const Visit& visit);

  /// Records that a gradient of `unit` arrived during the current visit.
  void note_gradient(UnitId unit);

  /// Ends the pass and keeps what happened. Returns the itinerary with exactly these visits and gradients: the expected
  /// one, another known one, or a new one.
  ItineraryId end();
  /// Forgets the pass that has begun, because it raised.
  void abandon();

  /// Records that an update happened between two passes. A successor is remembered separately with and without one.
  void note_update();

  /// Names what followed an itinerary last time, and whether an update lay between.
  struct Successor {
    ItineraryId itinerary;
    bool after_update = false;
  };
  std::optional<Successor> successor(ItineraryId id) const;

  /// Returns the pass expected next if an update comes (or came) first. That is the pass that last followed the
  /// previous pass and an update. If there is none, and the previous pass was a backward, it is that backward's
  /// forward.
  std::optional<ItineraryId> expected_after_update() const;

  /// Both throw InvariantError if the itinerary is forgotten.
  const std::vector<Visit>& visits(ItineraryId id) const;
  const Signature& signature(ItineraryId id) const;
  /// Returns the visits of all itineraries.
  std::vector<Visit> all_visits() const;
  /// Returns the itineraries that were forgotten since the last call.
  std::vector<ItineraryId> take_forgotten();
  std::size_t size() const { return itineraries_.size(); }

  /// Returns the index of the visit last announced, or -1 before the first.
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
  bool is_open_ = false;       // a pass has begun and has not ended
  bool after_update_ = false;  // an update came before the pass that has begun
  Signature current_signature_;
  std::vector<Visit> current_;
  std::optional<ItineraryId> expected_;
};

}  // namespace noria
