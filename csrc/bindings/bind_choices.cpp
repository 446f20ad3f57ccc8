// Binds costs, the simulator, the bounds, and the choices about activations, copies of units, loans and updates that
// wait. Byte counts are int, words are str.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bind_words.h"
#include "plan/copies.h"
#include "plan/costs.h"
#include "plan/loans.h"
#include "plan/matching.h"
#include "plan/postponed.h"
#include "plan/simulate.h"
#include "plan/swap.h"

namespace py = pybind11;

namespace noria {
namespace {

void bind_costs(py::module_& m) {
  using ByLane = std::map<std::string, double>;
  py::class_<Costs>(m, "Costs")
      .def(py::init([](const ByLane& bandwidth_gib_s, const ByLane& latency_us, std::vector<double> forward_us,
                       std::vector<double> backward_us, double draft_gib_s, double both_ways_gib_s, double host_gib_s,
                       double host_bytes_per_copied) {
             Costs costs;
             for (const auto& [lane, value] : bandwidth_gib_s) costs.bandwidth_gib_s[parse_lane(lane)] = value;
             for (const auto& [lane, value] : latency_us) costs.latency_us[parse_lane(lane)] = value;
             costs.forward_us = std::move(forward_us);
             costs.backward_us = std::move(backward_us);
             costs.draft_gib_s = draft_gib_s;
             costs.both_ways_gib_s = both_ways_gib_s;
             costs.host_gib_s = host_gib_s;
             costs.host_bytes_per_copied = host_bytes_per_copied;
             return costs;
           }),
           py::arg("bandwidth_gib_s") = ByLane(), py::arg("latency_us") = ByLane(),
           py::arg("forward_us") = std::vector<double>(), py::arg("backward_us") = std::vector<double>(),
           py::arg("draft_gib_s") = 0, py::arg("both_ways_gib_s") = 0, py::arg("host_gib_s") = 0,
           py::arg("host_bytes_per_copied") = 1);

  py::class_<StepTimes>(m, "StepTimes")
      .def(py::init([](double forward_us, double backward_us, double update_us, double forward_fetch_us,
                       double backward_fetch_us, double drain_us, double forward_collect_us, double backward_collect_us,
                       double offload_us, double peer_us, double host_copies_us, double host_updates_us,
                       double forward_drain_us) {
             return StepTimes{forward_us, backward_us,        update_us,           forward_fetch_us, backward_fetch_us,
                              drain_us,   forward_collect_us, backward_collect_us, forward_drain_us, offload_us,
                              peer_us,    host_copies_us,     host_updates_us};
           }),
           py::arg("forward_us") = 0, py::arg("backward_us") = 0, py::arg("update_us") = 0,
           py::arg("forward_fetch_us") = 0, py::arg("backward_fetch_us") = 0, py::arg("drain_us") = 0,
           py::arg("forward_collect_us") = 0, py::arg("backward_collect_us") = 0, py::arg("offload_us") = 0,
           py::arg("peer_us") = 0, py::arg("host_copies_us") = 0, py::arg("host_updates_us") = 0,
           py::arg("forward_drain_us") = 0)
      .def_readonly("forward_us", &StepTimes::forward_us)
      .def_readonly("backward_us", &StepTimes::backward_us)
      .def_readonly("update_us", &StepTimes::update_us)
      .def_readonly("forward_fetch_us", &StepTimes::forward_fetch_us)
      .def_readonly("backward_fetch_us", &StepTimes::backward_fetch_us)
      .def_readonly("drain_us", &StepTimes::drain_us)
      .def_readonly("forward_collect_us", &StepTimes::forward_collect_us)
      .def_readonly("backward_collect_us", &StepTimes::backward_collect_us)
      .def_readonly("forward_drain_us", &StepTimes::forward_drain_us)
      .def_readonly("offload_us", &StepTimes::offload_us)
      .def_readonly("peer_us", &StepTimes::peer_us)
      .def_readonly("host_copies_us", &StepTimes::host_copies_us)
      .def_readonly("host_updates_us", &StepTimes::host_updates_us);

  m.def("duration_us", &duration_us, py::arg("op"), py::arg("costs"));
  m.def("blocking_bound_us", &blocking_bound_us, py::arg("times"));
  m.def("deferred_bound_us", &deferred_bound_us, py::arg("times"));
  m.def("drafting_bound_us", &drafting_bound_us, py::arg("times"));
  m.def(
      "simulate",
      [](const std::vector<Op>& ops, std::vector<std::vector<std::int64_t>> waits, const Costs& costs,
         const std::vector<int>& priorities, int ring_slots, const std::vector<std::int64_t>& takes,
         const std::vector<std::int64_t>& gives) {
        RingUse ring;
        ring.num_slots = ring_slots;
        if (ring_slots > 0) ring.changes.assign(ops.size(), RingUse::Change::none);
        for (const std::int64_t op : takes) ring.changes.at(static_cast<std::size_t>(op)) = RingUse::Change::takes;
        for (const std::int64_t op : gives) ring.changes.at(static_cast<std::size_t>(op)) = RingUse::Change::gives;
        return simulate(ops, WaitList{std::move(waits)}, costs, priorities, ring);
      },
      py::arg("ops"), py::arg("waits"), py::arg("costs"), py::arg("priorities") = std::vector<int>(),
      py::arg("ring_slots") = 0, py::arg("takes") = std::vector<std::int64_t>(),
      py::arg("gives") = std::vector<std::int64_t>(), NoGil());
  m.def("is_postponed", &is_postponed, py::arg("number"), py::arg("num_slots"), py::arg("most_postponed"));
}

void bind_ways(py::module_& m) {
  m.def(
      "choose_ways",
      [](const std::vector<std::tuple<std::int64_t, std::int64_t, int, double, double>>& blocks, std::int64_t bytes,
         const std::array<double, 4>& host, const std::tuple<std::int64_t, double, double>& peers) {
        std::vector<SavedBlock> all;
        for (const auto& [saved, inputs, visits, forward_us, gap_us] : blocks) {
          all.push_back({Bytes{saved}, Bytes{inputs}, visits, forward_us, gap_us});
        }
        const auto& [room, us_per_byte, free_us] = peers;
        const Swaps swaps{Bytes{bytes}, {host[0], host[1], host[2], host[3]}, {Bytes{room}, us_per_byte, free_us}};
        std::vector<std::string> ways;
        for (const Way way : choose_ways(all, swaps)) {
          ways.emplace_back(way == Way::peers ? "peers" : way == Way::host ? "host" : "recompute");
        }
        return ways;
      },
      py::arg("blocks"), py::arg("bytes"), py::arg("host"), py::arg("peers"), NoGil());
  m.def(
      "choose_copies",
      [](const std::vector<std::pair<std::int64_t, int>>& units, double home_us_per_byte, double peer_us_per_byte,
         double home_us, double peer_us, std::int64_t room) {
        std::vector<FetchedUnit> all;
        for (const auto& [bytes, num_fetches] : units) all.push_back({Bytes{bytes}, num_fetches});
        return choose_copies(all, {home_us_per_byte, peer_us_per_byte, home_us, peer_us}, Bytes{room});
      },
      py::arg("units"), py::arg("home_us_per_byte"), py::arg("peer_us_per_byte"), py::arg("home_us"),
      py::arg("peer_us"), py::arg("room"), NoGil());
}

void bind_loans(py::module_& m) {
  m.attr("LOAN_GRANULE") = kLoanGranule.count;
  m.def(
      "match_memory",
      [](const std::vector<std::tuple<std::string, std::int64_t, std::int64_t, std::int64_t>>& offers,
         const std::vector<std::vector<double>>& bandwidth) {
        std::vector<MemoryOffer> all;
        for (const auto& [machine, needed, spare, wanted] : offers) {
          all.push_back({machine, Bytes{needed}, Bytes{spare}, Bytes{wanted}});
        }
        std::vector<std::tuple<int, int, std::int64_t, std::int64_t, std::int64_t>> loans;
        for (const MemoryLoan& loan : match(all, bandwidth)) {
          loans.emplace_back(loan.lender, loan.borrower, loan.offset.count, loan.bytes.count, loan.wanted.count);
        }
        return loans;
      },
      py::arg("offers"), py::arg("bandwidth"), NoGil());

  m.def("link_classes", &link_classes, py::arg("bandwidth"), NoGil());
  m.def(
      "need_and_spare",
      [](std::int64_t most_saved, std::int64_t largest, std::optional<std::int64_t> room) {
        const auto [needed, spare] =
            need_and_spare({Bytes{most_saved}, Bytes{largest}}, room ? std::optional(Bytes{*room}) : std::nullopt);
        return std::pair(needed.count, spare.count);
      },
      py::arg("most_saved"), py::arg("largest"), py::arg("room"));
  m.def(
      "lacking",
      [](std::int64_t most_saved, std::int64_t largest, std::int64_t room, std::int64_t lent) {
        return lacking({Bytes{most_saved}, Bytes{largest}}, Bytes{room}, Bytes{lent}).count;
      },
      py::arg("most_saved"), py::arg("largest"), py::arg("room"), py::arg("lent"));
  m.def(
      "ask_back",
      [](const std::vector<std::int64_t>& kept, std::int64_t lacked, bool in_parts) {
        std::vector<Bytes> before;
        for (std::int64_t count : kept) before.push_back({count});
        std::vector<std::int64_t> counts;
        for (Bytes each : ask_back(std::move(before), Bytes{lacked}, in_parts)) counts.push_back(each.count);
        return counts;
      },
      py::arg("kept"), py::arg("lacked"), py::arg("in_parts"));
}

}  // namespace

void bind_choices(py::module_& m) {
  bind_costs(m);
  bind_ways(m);
  bind_loans(m);
}

}  // namespace noria
