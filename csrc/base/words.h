// The vocabulary that plan, engine, backends and trace share: lanes and verbs.
#pragma once

#include <cstdint>
#include <string_view>

namespace noria {

/// A queue of work. All lanes run in order except `update`, the host pool, which is ordered by waits alone.
enum class Lane : std::uint8_t { compute, fetch, drain, collect, peer, update };
inline constexpr int kNumLanes = 6;

enum class Verb : std::uint8_t {
  forward,   // compute lane: a visit of a forward pass
  backward,  // compute lane: a visit of a backward pass
  user,      // compute lane: whatever the user's own loop does between passes (reads and edits p.grad)
  fetch,     // fetch lane: home to device; peer lane: from where it is stashed
  drain,     // drain lane: gradients to the home
  update,    // update lane: the host optimizer on one unit
  evict,     // no lane: the lease may be reused (bookkeeping, never waits)
  poison,    // fetch lane, hostile backend only: vacated memory is overwritten
  load,      // update lane: the calling thread reads or writes the home (materialize, load_state_dict)
  draft,     // update lane: an update computed beside the state, before `step()`
  sum,       // update lane: the sum of squares of a held gradient
  gather,    // collect lane: a unit's shards from all ranks
  reduce,    // collect lane: a unit's gradients, summed over all ranks, to each its shard
  save,      // compute lane: what a visit has saved for backward is there, or room for its return is
  offload,   // drain lane: what a visit has saved, to the host
  reload,    // fetch lane: and back
  probe,     // peer lane: a link is measured; not among the numbers of the lane
  stash,     // peer lane: a unit's working copy, to a peer; it is fetched from there then
};
inline constexpr int kNumVerbs = 18;

/// What a pass does with the units it visits.
enum class Phase : std::uint8_t { forward, backward };

std::string_view to_string(Lane lane);
std::string_view to_string(Verb verb);
std::string_view to_string(Phase phase);

/// The inverse of to_string; throws UsageError that lists the known words.
Lane parse_lane(std::string_view text);
Verb parse_verb(std::string_view text);
Phase parse_phase(std::string_view text);

}  // namespace noria
