// How long things take, for predictions; and the bound that no schedule of a mode can beat.
//
// Units: microseconds, GiB/s. The bounds are those of docs/journey.md: with F, B compute of forward and backward, U
// host update, f_F and f_B fetches of each, d drains, c_F and c_B what ranks send each other, o what is offloaded, p
// both ways to peers, h_c and h_u what copies and updates take of the host's memory, which they share. blocking:
// max(max(F, f_F, c_F) + max(B, d, f_B, c_B), d + o, p, h_c) + max(U, h_u); deferred: the same with U inside of the
// first max, and h_c + h_u in the second.
#pragma once

#include <map>
#include <vector>

#include "plan/plan.h"

namespace noria {

struct Costs {
  std::map<Lane, double> bandwidth_gib_s;  // fetch, drain, update; absent or 0: free
  std::map<Lane, double> latency_us;
  std::vector<double> forward_us;  // by unit
  std::vector<double> backward_us;
};

double duration_us(const Op& op, const Costs& costs);

struct StepTimes {
  double forward_us = 0, backward_us = 0, update_us = 0;
  double forward_fetch_us = 0, backward_fetch_us = 0, drain_us = 0;
  double forward_collect_us = 0, backward_collect_us = 0;
  double offload_us = 0;  // of what forwards save, on the lane of the drains; its way back is a fetch of backward
  double peer_us = 0;     // both, where it goes to peers
  double host_copies_us = 0, host_updates_us = 0;  // their bytes, at the pace of the host's memory alone
};
double blocking_bound_us(const StepTimes& times);
double deferred_bound_us(const StepTimes& times);
/// With a draft of every unit: updates and transfers have the whole step.
double drafting_bound_us(const StepTimes& times);

}  // namespace noria
