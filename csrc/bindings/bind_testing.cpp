// Binds what only tests and benchmarks use.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <utility>

#include "base/errors.h"
#include "testing/file_faults.h"
#include "testing/slow_pace.h"

namespace py = pybind11;

namespace noria {
namespace {

constexpr std::string_view kPeerLink = "peer:";

Hostility make_hostility(const py::dict& fields) {
  Hostility hostility;
  for (const auto& [name, value] : fields) {
    const auto field = py::cast<std::string>(name);
    if (field == "seed") {
      hostility.seed = py::cast<std::uint64_t>(value);
    } else if (field == "max_delay_us") {
      hostility.max_delay_us = py::cast<std::int64_t>(value);
    } else if (field == "hold_us") {
      for (const auto& [verb, us] : py::cast<std::map<std::string, std::int64_t>>(value)) {
        hostility.hold_us[parse_verb(verb)] = us;
      }
    } else if (field == "poison") {
      hostility.poison = py::cast<bool>(value);
    } else {
      throw UsageError("hostility with seed, max_delay_us, hold_us or poison", "\"" + field + "\"", "correct the name");
    }
  }
  return hostility;
}

Limits make_limits(const std::map<std::string, std::pair<double, double>>& by_lane) {
  Limits limits;
  for (const auto& [name, limit] : by_lane) {
    const LaneLimit both{limit.first, limit.second};
    if (name.starts_with(kPeerLink)) limits.links[std::stoi(name.substr(kPeerLink.size()))] = both;
    else limits.lanes[parse_lane(name)] = both;
  }
  return limits;
}

}  // namespace

void bind_testing(py::module_& m) {
  py::class_<FileFaults, std::shared_ptr<FileFaults>>(m, "FileFaults");
  py::class_<RandomFileFaults, FileFaults, std::shared_ptr<RandomFileFaults>>(m, "RandomFileFaults")
      .def(py::init([](std::uint64_t seed, double short_answers, double interruptions, std::int64_t max_delay_us) {
             return std::make_shared<RandomFileFaults>(FileHostility{seed, short_answers, interruptions, max_delay_us});
           }),
           py::arg("seed") = 0, py::arg("short_answers") = 0.0, py::arg("interruptions") = 0.0,
           py::arg("max_delay_us") = 0)
      .def(
          "fail_next",
          [](RandomFileFaults& faults, const std::string& way, int error, int num_before, int count) {
            faults.fail_next(way == "write" ? FileWay::write : FileWay::read, error, num_before, count);
          },
          py::arg("way"), py::arg("error"), py::arg("num_before") = 0, py::arg("count") = 1)
      .def_property_readonly("num_faults", &RandomFileFaults::num_faults);
  py::class_<Pace, std::shared_ptr<Pace>>(m, "Pace");
  py::class_<SlowPace, Pace, std::shared_ptr<SlowPace>>(m, "SlowPace")
      .def(py::init([](const std::map<std::string, std::pair<double, double>>& limits, const py::dict& hostility) {
             return std::make_shared<SlowPace>(make_hostility(hostility), make_limits(limits));
           }),
           py::arg("limits") = std::map<std::string, std::pair<double, double>>(), py::arg("hostility") = py::dict())
      .def(
          "drawn_us", [](SlowPace& pace, const std::string& lane) { return pace.drawn_us(parse_lane(lane)); },
          py::arg("lane"))
      .def("break_next_update", &SlowPace::break_next_update);
}

}  // namespace noria
