// Predicts how long ops take, and computes the bound that no schedule of a mode can beat.
//
// Units: microseconds, GiB/s.
//
// The bounds are those of docs/journey.md. Their terms are:
// - F, B: compute of forward and backward
// - U: updates on the host
// - f_F, f_B: fetches of forward and backward
// - d: drains; o: offloads of saved tensors
// - c_F, c_B: what ranks send each other
// - p: all work of the peer lane, in both directions
// - h_c, h_u: the time of copies and of updates at the pace of the host's memory, which they share
//
// blocking: max(max(F, f_F, c_F) + max(B, d, f_B, c_B), d + o, p, h_c) + max(U, h_u).
// deferred: max(max(F, f_F, c_F, U) + max(B, d, f_B, c_B), d + o, p, h_c + h_u).
// drafting: max(F + B, U, f_F + f_B, d + o, c_F + c_B, p, h_c + h_u).
#pragma once

#include <map>
#include <vector>

#include "plan/plan.h"

namespace noria {

struct Costs {
  std::map<Lane, double> bandwidth_gib_s;  // of a lane that is alone; absent or 0: bytes take no time
  std::map<Lane, double> latency_us;
  std::vector<double> forward_us;  // by unit
  std::vector<double> backward_us;
  double draft_gib_s = 0;            // of drafts, which compute more; 0: as updates
  double both_ways_gib_s = 0;        // of fetches and drains together, while both run; 0: neither slows the other down
  double host_gib_s = 0;             // of the host's memory, which fetches, drains and updates share; 0: no limit
  double host_bytes_per_copied = 1;  // bytes of the host's memory that a copied byte reads or writes
};

/// Returns how long the op takes alone: a visit by its unit, an eviction 0, all else by latency and bandwidth of its
/// lane. On the compute lane the loop alone has a latency.
double duration_us(const Op& op, const Costs& costs);
double latency_us_of(const Op& op, const Costs& costs);
double bandwidth_gib_s_of(const Op& op, const Costs& costs);

struct StepTimes {
  double forward_us = 0, backward_us = 0, update_us = 0;
  double forward_fetch_us = 0, backward_fetch_us = 0, drain_us = 0;
  double forward_collect_us = 0, backward_collect_us = 0;
  double forward_drain_us = 0;                     // from updates on the device; drain_us has the others
  double offload_us = 0;                           // on the drain lane; reloads count in backward_fetch_us
  double peer_us = 0;                              // all work of the peer lane
  double host_copies_us = 0, host_updates_us = 0;  // if only the host's memory limited them
};
double blocking_bound_us(const StepTimes& times);
double deferred_bound_us(const StepTimes& times);
/// Returns the bound if every unit has a draft: updates and transfers may then use the whole step.
double drafting_bound_us(const StepTimes& times);

}  // namespace noria
