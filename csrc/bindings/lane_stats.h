// Makes the Python dict of lane statistics, which all bindings return.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "base/words.h"
#include "device/backend.h"

namespace noria {

/// Returns {"busy_us", "busy_us_by_verb": {verb: us}, "num_ops", "bytes", "stalled_us": {(giver, waiter): us}}.
/// Threads: needs the GIL.
inline pybind11::dict stats_dict(const LaneStats& stats) {
  pybind11::dict stalled;
  for (const auto& [pair, us] : stats.stalled_us) {
    stalled[pybind11::make_tuple(std::string(to_string(pair.first)), std::string(to_string(pair.second)))] = us;
  }
  pybind11::dict by_verb;
  for (const auto& [verb, us] : stats.busy_us_by_verb) by_verb[pybind11::str(std::string(to_string(verb)))] = us;
  pybind11::dict result;
  result["busy_us"] = stats.busy_us;
  result["busy_us_by_verb"] = by_verb;
  result["num_ops"] = stats.num_ops;
  result["bytes"] = stats.bytes.count;
  result["stalled_us"] = stalled;
  return result;
}

/// Returns the dict of what `ask` returns. Calls `ask` without the GIL.
template <class Ask>
pybind11::dict asked_stats(Ask ask) {
  LaneStats stats;
  {
    const pybind11::gil_scoped_release release;
    stats = ask();
  }
  return stats_dict(stats);
}

}  // namespace noria
