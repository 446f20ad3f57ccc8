// Binds the update kernels, which take addresses, and the host pool that runs them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <tuple>
#include <utility>
#include <variant>

#include "base/errors.h"
#include "base/words.h"
#include "bindings/bind_words.h"
#include "bindings/lane_stats.h"
#include "bindings/orthogonalize.h"
#include "optim/device_optimizer.h"
#include "optim/factored.h"
#include "optim/host_optimizer.h"
#include "optim/moment_codes.h"
#include "optim/muon.h"
#include "optim/split_master.h"
#include "optim/update.h"

namespace py = pybind11;

namespace noria {
namespace {

using ShortPiece = std::tuple<std::int64_t, std::int64_t, UpdateScalars>;
using Piece = std::tuple<std::int64_t, std::int64_t, UpdateScalars, std::uint64_t, std::int64_t>;
using Pieces = std::vector<std::variant<ShortPiece, Piece>>;
/// How many matrices, rows and columns a parameter has, and the addresses of its moments by row and by column; 0: none.
using Factored = std::tuple<std::int64_t, std::int64_t, std::int64_t, Address, Address>;

UpdateTask parse_task(const std::string& text) {
  if (text == "update") return UpdateTask::update;
  if (text == "sum") return UpdateTask::sum;
  throw UsageError("a task of the host pool", "\"" + text + "\"", "use one of update, sum; `drafting` makes drafts");
}

MomentArray make_moment(const std::string& state, Address array, Address scales) {
  if (state == "fp32") return {pointer<float>(array), nullptr, nullptr, nullptr};
  if (state == "bf16") return {nullptr, pointer<std::uint16_t>(array), nullptr, nullptr};
  if (state == "8bit") return {nullptr, nullptr, pointer<std::uint8_t>(array), pointer<float>(scales)};
  throw UsageError("a format of the state", "\"" + state + "\"", "use one of fp32, bf16, 8bit");
}

UpdatePiece make_piece(const ShortPiece& piece) {
  UpdatePiece made;
  made.offset = std::get<0>(piece);
  made.count = std::get<1>(piece);
  made.scalars = std::get<2>(piece);
  return made;
}

UpdatePiece make_piece(const Piece& piece) {
  UpdatePiece made = make_piece(ShortPiece(std::get<0>(piece), std::get<1>(piece), std::get<2>(piece)));
  made.first = std::get<3>(piece);
  made.first_block = std::get<4>(piece);
  return made;
}

UpdateJob make_job(const std::string& rule, const Pieces& pieces, const UnitArrays& arrays, Address gradient,
                   const std::string& task, bool sums, const std::vector<std::pair<Address, int>>& late_scales,
                   const std::vector<Address>& gradients, const std::vector<Factored>& factored) {
  UpdateJob job;
  job.task = parse_task(task);
  if (sums) job.sums = std::make_shared<std::vector<double>>();
  job.rule = parse_update_rule(rule);
  if (job.rule == UpdateRule::muon) job.orthogonalize = orthogonalize_by_torch;
  job.arrays = arrays;
  job.gradient = pointer<void>(gradient);
  for (const auto& piece : pieces) {
    job.pieces.push_back(std::visit([](const auto& each) { return make_piece(each); }, piece));
  }
  NORIA_INVARIANT(late_scales.empty() || late_scales.size() == pieces.size(), "late scales are by piece");
  for (std::size_t i = 0; i < late_scales.size(); ++i) {
    job.pieces[i].late_scales = pointer<const float>(late_scales[i].first);
    job.pieces[i].num_late_scales = late_scales[i].second;
  }
  NORIA_INVARIANT(gradients.empty() || gradients.size() == pieces.size(), "gradients that lie apart are by piece");
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const std::int64_t before = job.pieces[i].offset * job.gradient_item_bytes();
    job.pieces[i].gradient = pointer<const void>(gradients[i] - static_cast<Address>(before));
  }
  NORIA_INVARIANT(factored.empty() || factored.size() == pieces.size(), "factored moments are by piece");
  for (std::size_t i = 0; i < factored.size(); ++i) {
    const auto& [num_matrices, num_rows, num_columns, by_row, by_column] = factored[i];
    job.pieces[i].factored = {num_matrices, num_rows, num_columns, pointer<float>(by_row), pointer<float>(by_column)};
  }
  return job;
}

std::shared_ptr<HostOptimizer> make_host_optimizer(int num_threads, bool is_beside_device, int numa_node,
                                                   std::shared_ptr<Pace> pace) {
  HostOptimizerOptions options{num_threads, is_beside_device, numa_node};
  if (pace) options.pace = std::move(pace);
  return std::make_shared<HostOptimizer>(options);
}

void bind_kernels(py::module_& m) {
  py::class_<UpdateScalars>(m, "UpdateScalars")
      .def_readwrite("divisor", &UpdateScalars::divisor)
      .def_readwrite("prefactor", &UpdateScalars::prefactor)
      .def_readwrite("factor", &UpdateScalars::factor)
      .def_readwrite("decay", &UpdateScalars::decay)
      .def_readwrite("negative_step", &UpdateScalars::negative_step)
      .def_readwrite("one_minus_beta1", &UpdateScalars::one_minus_beta1)
      .def_readwrite("one_minus_beta2", &UpdateScalars::one_minus_beta2)
      .def_readwrite("inverse_bias2_root", &UpdateScalars::inverse_bias2_root)
      .def_readwrite("eps", &UpdateScalars::eps)
      .def_readwrite("momentum", &UpdateScalars::momentum)
      .def_readwrite("gradient_share", &UpdateScalars::gradient_share)
      .def_readwrite("nesterov", &UpdateScalars::nesterov)
      .def_readwrite("is_first", &UpdateScalars::is_first)
      .def_readwrite("rounding", &UpdateScalars::rounding)
      .def_readwrite("least_rms", &UpdateScalars::least_rms)
      .def_readwrite("most_rms", &UpdateScalars::most_rms)
      .def_readwrite("iteration_a", &UpdateScalars::iteration_a)
      .def_readwrite("iteration_b", &UpdateScalars::iteration_b)
      .def_readwrite("iteration_c", &UpdateScalars::iteration_c)
      .def_readwrite("num_iterations", &UpdateScalars::num_iterations)
      .def("__eq__", &have_same_bits, "Bit by bit.");

  m.def(
      "update_scalars",
      [](const std::string& rule, std::int64_t step, double lr, double beta1, double beta2, double eps,
         double weight_decay, double momentum, double dampening, bool nesterov, bool maximize, double factor,
         double divisor, double prefactor, std::uint64_t seed, double beta2_decay, double least_rms, double most_rms,
         const std::array<double, 3>& iteration, int num_iterations) {
        const UpdateHyper hyper{lr,          beta1,     beta2,    eps,       weight_decay,  momentum,
                                dampening,   nesterov,  maximize, factor,    divisor,       prefactor,
                                beta2_decay, least_rms, most_rms, iteration, num_iterations};
        return update_scalars(parse_update_rule(rule), hyper, step, seed);
      },
      py::arg("rule"), py::arg("step"), py::kw_only(), py::arg("lr"), py::arg("beta1") = 0.9, py::arg("beta2") = 0.999,
      py::arg("eps") = 1e-8, py::arg("weight_decay") = 0.0, py::arg("momentum") = 0.0, py::arg("dampening") = 0.0,
      py::arg("nesterov") = false, py::arg("maximize") = false, py::arg("factor") = 1.0, py::arg("divisor") = 1.0,
      py::arg("prefactor") = 1.0, py::arg("seed") = 0, py::arg("beta2_decay") = -0.8, py::arg("least_rms") = 1e-3,
      py::arg("most_rms") = 1.0, py::arg("iteration") = std::array<double, 3>{}, py::arg("num_iterations") = 0);
  m.def("instruction_sets", &instruction_sets);

  py::class_<UnitArrays>(m, "UnitArrays")
      .def(py::init([](Address master, Address working, Address low, Address first, Address second,
                       const std::string& state, Address first_scales, Address second_scales) {
             return UnitArrays{pointer<float>(master), pointer<std::uint16_t>(working), pointer<std::uint16_t>(low),
                               make_moment(state, first, first_scales), make_moment(state, second, second_scales)};
           }),
           py::kw_only(), py::arg("master") = 0, py::arg("working") = 0, py::arg("low") = 0, py::arg("m") = 0,
           py::arg("v") = 0, py::arg("state") = "fp32", py::arg("m_scales") = 0, py::arg("v_scales") = 0);

  py::class_<UpdateJob>(m, "UpdateJob")
      .def(py::init(&make_job), py::arg("rule"), py::arg("pieces"), py::arg("arrays"), py::kw_only(),
           py::arg("gradient") = 0, py::arg("task") = "update", py::arg("sums") = false,
           py::arg("late_scales") = std::vector<std::pair<Address, int>>(),
           py::arg("gradients") = std::vector<Address>(), py::arg("factored") = std::vector<Factored>())
      .def_property_readonly("rule", [](const UpdateJob& job) { return to_string(job.rule); })
      .def_property_readonly("bytes", [](const UpdateJob& job) { return job.bytes().count; })
      .def_property_readonly("taken_sums",
                             [](const UpdateJob& job) { return job.sums ? *job.sums : std::vector<double>(); })
      .def(
          "sums",
          [](const UpdateJob& job, const std::string& instruction_set) {
            check(job);
            std::vector<double> sums;
            for (const UpdatePiece& piece : job.pieces) {
              sums.push_back(sum_of_squares(job, piece, piece.offset, piece.count, instruction_set));
            }
            return sums;
          },
          py::arg("instruction_set") = "", NoGil())
      .def(
          "run",
          [](const UpdateJob& job, const std::string& instruction_set) {
            check(job);
            const auto nothing = [] {};
            if (job.rule == UpdateRule::adafactor) {
              FactoredUpdate().run(job, for_each_here, nothing, instruction_set);
              return;
            }
            if (job.rule == UpdateRule::muon) {
              run_muon(job, for_each_here, nothing, instruction_set);
              return;
            }
            if (job.task == UpdateTask::draft) begin_draft(job);
            for (const UpdatePiece& piece : job.pieces) {
              update_elements(job, piece, piece.offset, piece.count, instruction_set);
            }
          },
          py::arg("instruction_set") = "", NoGil())
      .def(
          "drafting",
          [](UpdateJob job, Address log, std::int64_t num_elements, std::int64_t num_blocks, std::int64_t num_slots) {
            make_draft(job, undo_log_at(pointer(log), {num_elements, num_blocks, num_slots}));
            return job;
          },
          py::arg("log"), py::arg("num_elements"), py::arg("num_blocks"), py::arg("num_slots"))
      .def("undoing", [](const UpdateJob& job) { return undo_of(job); })
      .def(
          "redoing",
          [](UpdateJob job, const UpdateJob& draft) {
            make_redo(job, draft);
            return job;
          },
          py::arg("draft"))
      .def_property_readonly("log_counts", [](const UpdateJob& job) {
        NORIA_INVARIANT(job.has_log(), "this job has no undo log");
        return std::pair(job.log.header->num_used, job.log.header->num_left);
      });

  m.def("num_undo_blocks", &num_undo_blocks, py::arg("count"));
  m.def(
      "undo_log_bytes",
      [](std::int64_t num_elements, std::int64_t num_blocks, std::int64_t num_slots) {
        return undo_log_bytes({num_elements, num_blocks, num_slots}).count;
      },
      py::arg("num_elements"), py::arg("num_blocks"), py::arg("num_slots"));
  m.def(
      "num_update_chunks",
      [](std::int64_t count) {
        std::vector<UpdateChunk> chunks;
        cut_into_chunks({UpdatePiece{.count = count}}, chunks);
        return chunks.size();
      },
      py::arg("count"));
  m.attr("SUM_SPAN") = kSumSpan;
  m.attr("STATE_BLOCK") = kStateBlock;
  m.attr("MOST_LATE_SCALES") = kMostLateScales;
  m.def(
      "encode_moment",
      [](Address values, Address codes, Address scales, std::size_t count, bool is_first) {
        encode_moment(pointer<const float>(values), pointer<std::uint8_t>(codes), pointer<float>(scales), count,
                      is_first);
      },
      py::arg("values"), py::arg("codes"), py::arg("scales"), py::arg("count"), py::kw_only(), py::arg("is_first"),
      NoGil());
  m.def(
      "decode_moment",
      [](Address codes, Address scales, Address values, std::size_t count, bool is_first) {
        decode_moment(pointer<const std::uint8_t>(codes), pointer<const float>(scales), pointer<float>(values), count,
                      is_first);
      },
      py::arg("codes"), py::arg("scales"), py::arg("values"), py::arg("count"), py::kw_only(), py::arg("is_first"),
      NoGil());

  m.def(
      "split_master",
      [](Address master, Address high, Address low, std::size_t count) {
        split_master(pointer<const float>(master), pointer<std::uint16_t>(high), pointer<std::uint16_t>(low), count);
      },
      py::arg("master"), py::arg("high"), py::arg("low"), py::arg("count"), NoGil());
  m.def(
      "join_master",
      [](Address high, Address low, Address master, std::size_t count) {
        join_master(pointer<const std::uint16_t>(high), pointer<const std::uint16_t>(low), pointer<float>(master),
                    count);
      },
      py::arg("high"), py::arg("low"), py::arg("master"), py::arg("count"), NoGil());
}

}  // namespace

void bind_optim(py::module_& m) {
  bind_kernels(m);

  py::class_<HostOptimizer, std::shared_ptr<HostOptimizer>>(m, "HostOptimizer")
      .def(py::init(&make_host_optimizer), py::arg("num_threads") = 0, py::kw_only(),
           py::arg("is_beside_device") = false, py::arg("numa_node") = -1, py::arg("pace") = py::none())
      .def(
          "submit",
          [](HostOptimizer& optimizer, UpdateJob job, std::vector<Ticket> waits, int priority, std::int64_t op,
             std::int32_t unit, const std::string& verb) {
            const OpLabel label{OpId(op), Lane::update, parse_verb(verb), UnitId(unit)};
            return optimizer.submit(label, std::move(job), std::move(waits), priority);
          },
          py::arg("job"), py::arg("waits") = std::vector<Ticket>(), py::kw_only(), py::arg("priority") = 0,
          py::arg("op") = -1, py::arg("unit") = -1, py::arg("verb") = "update", NoGil())
      .def("recall", &HostOptimizer::recall, py::arg("ticket"), NoGil())
      .def("idle", &HostOptimizer::idle, NoGil())
      .def("close", &HostOptimizer::close, NoGil())
      .def("stats", [](const HostOptimizer& optimizer) { return stats_dict(optimizer.stats()); })
      .def("set_trace", &HostOptimizer::set_trace, py::arg("trace").none(true), NoGil())
      .def_property_readonly("num_threads", &HostOptimizer::num_threads);
}

}  // namespace noria
