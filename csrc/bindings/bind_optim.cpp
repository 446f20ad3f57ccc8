// The AdamW kernels by address, and the host pool that runs them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

#include "base/words.h"
#include "bindings/lane_stats.h"
#include "optim/adamw.h"
#include "optim/host_optimizer.h"

namespace py = pybind11;

namespace noria {
namespace {

using Address = std::uintptr_t;
using Release = py::call_guard<py::gil_scoped_release>;

template <class Element>
Element* at(Address address) {
  return reinterpret_cast<Element*>(address);
}

AdamWJob make_job(const std::vector<std::tuple<std::int64_t, std::int64_t, AdamWScalars>>& pieces, Address m, Address v,
                  Address gradient, Address master, Address working, Address low) {
  AdamWJob job;
  job.master = at<float>(master);
  job.working = at<std::uint16_t>(working);
  job.low = at<std::uint16_t>(low);
  job.m = at<float>(m);
  job.v = at<float>(v);
  job.gradient = at<void>(gradient);
  for (const auto& [offset, count, scalars] : pieces) job.pieces.push_back({offset, count, scalars});
  return job;
}

std::shared_ptr<HostOptimizer> make_host_optimizer(int num_threads, double bandwidth_gib_s, double latency_us,
                                                   std::uint64_t seed, std::int64_t max_delay_us,
                                                   std::int64_t hold_us) {
  HostOptimizerOptions options;
  options.num_threads = num_threads;
  options.limit = {bandwidth_gib_s, latency_us};
  options.hostility.seed = seed;
  options.hostility.max_delay_us = max_delay_us;
  if (hold_us > 0) options.hostility.hold_us[Verb::update] = hold_us;
  return std::make_shared<HostOptimizer>(options);
}

void bind_adamw(py::module_& m) {
  py::class_<AdamWScalars>(m, "AdamWScalars")
      .def_readwrite("gradient_sign", &AdamWScalars::gradient_sign)
      .def_readwrite("decay", &AdamWScalars::decay)
      .def_readwrite("one_minus_beta1", &AdamWScalars::one_minus_beta1)
      .def_readwrite("beta2", &AdamWScalars::beta2)
      .def_readwrite("one_minus_beta2", &AdamWScalars::one_minus_beta2)
      .def_readwrite("negative_step", &AdamWScalars::negative_step)
      .def_readwrite("inverse_bias2_root", &AdamWScalars::inverse_bias2_root)
      .def_readwrite("eps", &AdamWScalars::eps);

  m.def(
      "adamw_scalars",
      [](std::int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay, bool maximize) {
        return adamw_scalars({lr, beta1, beta2, eps, weight_decay, maximize}, step);
      },
      py::arg("step"), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
      py::arg("weight_decay"), py::arg("maximize") = false);
  m.def("adamw_instruction_sets", &adamw_instruction_sets);

  m.def(
      "adamw_fp32",
      [](Address master, Address moment1, Address moment2, Address gradient, std::size_t count,
         const AdamWScalars& scalars, const std::string& instruction_set) {
        adamw_fp32(at<float>(master), at<float>(moment1), at<float>(moment2), at<const float>(gradient), count, scalars,
                   instruction_set);
      },
      py::arg("master"), py::arg("m"), py::arg("v"), py::arg("gradient"), py::arg("count"), py::arg("scalars"),
      py::arg("instruction_set") = "", Release());
  m.def(
      "adamw_split",
      [](Address high, Address low, Address moment1, Address moment2, Address gradient, std::size_t count,
         const AdamWScalars& scalars, const std::string& instruction_set) {
        adamw_split(at<std::uint16_t>(high), at<std::uint16_t>(low), at<float>(moment1), at<float>(moment2),
                    at<const std::uint16_t>(gradient), count, scalars, instruction_set);
      },
      py::arg("high"), py::arg("low"), py::arg("m"), py::arg("v"), py::arg("gradient"), py::arg("count"),
      py::arg("scalars"), py::arg("instruction_set") = "", Release());
  m.def(
      "split_master",
      [](Address master, Address high, Address low, std::size_t count) {
        split_master(at<const float>(master), at<std::uint16_t>(high), at<std::uint16_t>(low), count);
      },
      py::arg("master"), py::arg("high"), py::arg("low"), py::arg("count"), Release());
  m.def(
      "join_master",
      [](Address high, Address low, Address master, std::size_t count) {
        join_master(at<const std::uint16_t>(high), at<const std::uint16_t>(low), at<float>(master), count);
      },
      py::arg("high"), py::arg("low"), py::arg("master"), py::arg("count"), Release());
}

}  // namespace

void bind_optim(py::module_& m) {
  bind_adamw(m);

  py::class_<AdamWJob>(m, "AdamWJob")
      .def(py::init(&make_job), py::arg("pieces"), py::kw_only(), py::arg("m"), py::arg("v"), py::arg("gradient"),
           py::arg("master") = 0, py::arg("working") = 0, py::arg("low") = 0)
      .def_property_readonly("bytes", [](const AdamWJob& job) { return job.bytes().count; });

  py::class_<HostOptimizer, std::shared_ptr<HostOptimizer>>(m, "HostOptimizer")
      .def(py::init(&make_host_optimizer), py::arg("num_threads") = 0, py::kw_only(), py::arg("bandwidth_gib_s") = 0.0,
           py::arg("latency_us") = 0.0, py::arg("seed") = 0, py::arg("max_delay_us") = 0, py::arg("hold_us") = 0)
      .def(
          "submit",
          [](HostOptimizer& optimizer, AdamWJob job, std::vector<Ticket> waits, std::int64_t op, std::int32_t unit) {
            const OpLabel label{OpId(op), Lane::update, Verb::update, UnitId(unit)};
            return optimizer.submit(label, std::move(job), std::move(waits));
          },
          py::arg("job"), py::arg("waits") = std::vector<Ticket>(), py::kw_only(), py::arg("op") = -1,
          py::arg("unit") = -1, Release())
      .def("idle", &HostOptimizer::idle, Release())
      .def("close", &HostOptimizer::close, Release())
      .def("stats", [](const HostOptimizer& optimizer) { return stats_dict(optimizer.stats()); })
      .def("set_trace", &HostOptimizer::set_trace, py::arg("trace").none(true), Release())
      .def_property_readonly("num_threads", &HostOptimizer::num_threads);
}

}  // namespace noria
