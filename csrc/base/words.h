// Defines the words that plan, engine, backends and trace share: lanes and verbs.
#pragma once

#include <cstdint>
#include <string_view>

namespace noria {

/// A lane is a queue of work. All lanes run in order except `update`: that is the host pool, ordered by waits alone.
enum class Lane : std::uint8_t { compute, fetch, drain, collect, peer, update, read, write, read_weights };
inline constexpr int kNumLanes = 9;

enum class Verb : std::uint8_t {
  forward,       // compute lane: a visit of a forward pass
  backward,      // compute lane: a visit of a backward pass
  user,          // compute lane: what the user's own loop does between passes (reads and edits p.grad)
  fetch,         // fetch lane: home to device; peer lane: from the peer where the unit is stashed
  drain,         // drain lane: gradients to the home
  update,        // update lane: the host optimizer on one unit; compute lane: the device on a piece of a unit
  evict,         // no lane: the lease may be reused (bookkeeping, never waits)
  poison,        // fetch lane, hostile backend only: vacated memory is overwritten
  load,          // update lane: the calling thread reads or writes the home (materialize, load_state_dict)
  draft,         // update lane: an update before `step()`, which can be undone
  undo,          // update lane: of a draft
  sum,           // update lane: the sum of squares of a held gradient
  gather,        // collect lane: all-gather of a unit's shards
  reduce,        // collect lane: reduce-scatter of a unit's gradients: each rank gets its shard of the sum
  save,          // compute lane: marks that saved tensors are written, or that memory for a reload is free
  offload,       // drain lane: saved tensors to the host; peer lane: to a peer
  reload,        // fetch lane: saved tensors back from the host; peer lane: from a peer
  probe,         // peer lane: measures a link; not counted in the numbers of the lane
  stash,         // peer lane: a unit's working copy to a peer; later fetches read it there
  fetch_state,   // fetch lane: a piece of a unit to the device, for an update there
  drain_state,   // drain lane: the updated piece back to the home
  read_state,    // read lane: a unit's state from its file to host memory
  write_state,   // write lane: and back
  read_weights,  // lane of that name: a unit's frozen weights from their file to host memory
};
inline constexpr int kNumVerbs = 24;

/// Says whether a pass or a visit belongs to forward or to backward.
enum class Phase : std::uint8_t { forward, backward };

std::string_view to_string(Lane lane);
std::string_view to_string(Verb verb);
std::string_view to_string(Phase phase);

/// Returns the value that to_string prints as `text`. Throws UsageError that lists the known words if there is none.
Lane parse_lane(std::string_view text);
Verb parse_verb(std::string_view text);
Phase parse_phase(std::string_view text);

}  // namespace noria
