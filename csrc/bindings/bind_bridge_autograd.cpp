#include "bindings/bind_bridge.h"
#include "bindings/python_errors.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <tuple>

namespace py = pybind11;

namespace noria {
namespace {

void bind_hooks(py::module_& m) {
  py::class_<EngineHooks>(m, "EngineHooks")
      .def(
          "add_hook",
          [](const EngineHooks& self, std::string name, const std::vector<std::int32_t>& needs) {
            return self->visits().add_hook(std::move(name), unit_ids(needs)).value;
          },
          py::arg("name"), py::arg("needs"))
      .def("begin_forward", of_owner<EngineHooks>(&TorchBridge::visits, &ModuleVisits::begin_forward), py::arg("root"),
           py::arg("training"), py::arg("grad_enabled"), NoGil())
      .def("end_forward", of_owner<EngineHooks>(&TorchBridge::visits, &ModuleVisits::end_forward), py::arg("outputs"),
           NoGil())
      .def(
          "enter", [](const EngineHooks& self, std::int32_t hook) { self->visits().enter(HookId(hook)); },
          py::arg("hook"), NoGil())
      .def(
          "leave",
          [](const EngineHooks& self, std::int32_t hook, const std::vector<at::Tensor>& outputs) {
            self->visits().leave(HookId(hook), outputs);
          },
          py::arg("hook"), py::arg("outputs"), NoGil())
      .def(
          "inner_outputs",
          [](const EngineHooks& self, std::int32_t hook, const std::vector<at::Tensor>& outputs) {
            self->visits().inner_outputs(HookId(hook), outputs);
          },
          py::arg("hook"), py::arg("outputs"), NoGil())
      .def(
          "inner_was_first",
          [](const EngineHooks& self, std::int32_t hook) { return self->visits().inner_was_first(HookId(hook)); },
          py::arg("hook"))
      .def(
          "visit_for_operator",
          [](const EngineHooks& self, std::int32_t hook) { self->visits().visit_for_operator(HookId(hook)); },
          py::arg("hook"), NoGil())
      .def("recover", of_owner<EngineHooks>(&TorchBridge::backwards, &Backwards::recover), NoGil())
      .def("abandon_forward", of_owner<EngineHooks>(&TorchBridge::backwards, &Backwards::abandon_forward), NoGil());
}

const char* word_of(GradientIs is) {
  switch (is) {
  case GradientIs::none:
    return "none";
  case GradientIs::held:
    return "held";
  case GradientIs::foreign:
    return "foreign";
  }
  return "";
}

template <class Call>
auto of_views(Call call) {
  return of_owner<EngineGradients>(&TorchBridge::gradients, call);
}

void bind_gradients(py::module_& m) {
  py::class_<EngineGradients>(m, "EngineGradients")
      .def(
          "gradient_is", [](const EngineGradients& self, int index) { return word_of(self->gradients().is(index)); },
          py::arg("index"))
      .def("take_foreign_gradient", of_views(&GradientViews::take_foreign), py::arg("index"), NoGil())
      .def("take_part", of_views(&GradientViews::take_part), py::arg("index"), NoGil())
      .def("is_unreduced", of_views(&GradientViews::is_unreduced), py::arg("index"), NoGil())
      .def(
          "late_scales",
          [](const EngineGradients& self, int index) {
            const auto [memory, count] = self->gradients().late_scales(index);
            return std::pair{address_of(memory), count};
          },
          py::arg("index"), NoGil())
      .def("take_scales", of_views(&GradientViews::take_scales), py::arg("index"), NoGil())
      .def("scale_values", of_views(&GradientViews::scale_values), py::arg("index"), NoGil())
      .def("drop_scales", of_views(&GradientViews::drop_scales), py::arg("index"), NoGil())
      .def("first_scaled", of_views(&GradientViews::first_scaled), py::arg("indices"), NoGil())
      .def("apply_scales", of_views(&GradientViews::apply_scales), py::arg("index"), NoGil())
      .def("unscale_used", of_views(&GradientViews::unscale_used), py::arg("indices"), py::arg("inverse"), NoGil())
      .def(
          "guard_gradients", [](const EngineGradients& self) { self->gradients().guard(); }, NoGil())
      .def(
          "access_held",
          [](const EngineGradients& self, std::int32_t unit) { self.engine().access_held(UnitId(unit), Stream()); },
          py::arg("unit"), NoGil())
      .def(
          "begin_scaling",
          [](const EngineGradients& self, std::int32_t unit, float divisor, float prefactor) {
            self.engine().begin_scaling(UnitId(unit), divisor, prefactor, Stream());
          },
          py::arg("unit"), py::arg("divisor"), py::arg("prefactor"), NoGil())
      .def(
          "end_scaling",
          [](const EngineGradients& self, std::int32_t unit) { self.engine().drafts()->end_scaling(UnitId(unit)); },
          py::arg("unit"), NoGil())
      .def(
          "sum_gradients",
          [](const EngineGradients& self, const std::vector<std::pair<std::int32_t, UpdateJob>>& jobs) {
            std::vector<std::pair<UnitId, UpdateJob>> asked;
            for (const auto& [unit, job] : jobs) asked.emplace_back(UnitId(unit), job);
            return self->sum_gradients(std::move(asked));
          },
          py::arg("jobs"), NoGil());
}

void bind_home(py::module_& m) {
  py::class_<EngineHome>(m, "EngineHome")
      .def(
          "access_home",
          [](const EngineHome& self, std::int32_t unit, bool write, bool frozen) {
            self->access_home(UnitId(unit), write, frozen);
          },
          py::arg("unit"), py::arg("write"), py::arg("frozen") = true, NoGil())
      .def(
          "access_state",
          [](const EngineHome& self, std::int32_t unit, bool writes, bool holds) {
            self.engine().access_state(UnitId(unit), writes, holds);
          },
          py::arg("unit"), py::arg("writes"), py::arg("holds"), NoGil())
      .def(
          "release_states", [](const EngineHome& self) { self.engine().release_states(); }, NoGil())
      .def(
          "check_weights",
          [](const EngineHome& self, std::int32_t unit, bool awaits_writes) {
            self.engine().check_weights(UnitId(unit), awaits_writes);
          },
          py::arg("unit"), py::arg("awaits_writes"), NoGil())
      .def("lost_weights",
           [](const EngineHome& self) {
             std::vector<std::tuple<std::int32_t, int, std::string>> found;
             for (const auto& [unit, times, why] : without_gil([&] { return self.engine().lost_weights(); })) {
               found.emplace_back(unit.value, times, why);
             }
             return found;
           })
      .def(
          "clear_lost_weights",
          [](const EngineHome& self, std::int32_t unit) { self.engine().clear_lost_weights(UnitId(unit)); },
          py::arg("unit"), NoGil())
      .def(
          "raise_lost_writes", [](const EngineHome& self) { self->raise_lost_writes(); }, NoGil())
      .def(
          "open_home",
          [](const EngineHome& self, const std::vector<std::int32_t>& units, bool write,
             const std::vector<std::int64_t>& shown,
             bool frozen) { self->open_home(unit_ids(units), pointers(shown), write, frozen); },
          py::arg("units"), py::arg("write"), py::arg("shown") = std::vector<std::int64_t>(), py::arg("frozen") = true,
          NoGil())
      .def(
          "close_home",
          [](const EngineHome& self, std::size_t before, bool write) { self->home().close(before, write); },
          py::arg("before"), py::arg("write"), NoGil())
      .def("num_open", of_owner<EngineHome>(&TorchBridge::home, &HomeView::num_open))
      .def(
          "is_written", [](const EngineHome& self, std::int32_t unit) { return self->home().is_written(UnitId(unit)); },
          py::arg("unit"))
      .def("bring_home", of_owner<EngineHome>(&TorchBridge::home, &HomeView::bring), NoGil())
      .def("release", of_owner<EngineHome>(&TorchBridge::storages, &StorageBinding::release), py::arg("index"),
           py::arg("replacement"))
      .def("bump_versions", of_owner<EngineHome>(&TorchBridge::storages, &StorageBinding::bump_versions),
           py::arg("indices"));
}

void set_parts_callbacks(const EngineRanks& self, py::function norms, py::function multiply) {
  const auto norms_of = [kept = keep(std::move(norms))](const std::vector<int>& indices, const NormAsked& asked) {
    std::vector<at::Tensor> found;
    keep_python_errors([&] {
      const py::object dtype = asked.dtype ? py::cast(*asked.dtype) : py::none();
      for (const py::handle& each : (*kept)(indices, asked.of_list, asked.order, dtype)) {
        found.push_back(each.is_none() ? at::Tensor() : each.cast<at::Tensor>());
      }
    });
    return found;
  };
  self->gradients().set_rank_parts(
      {norms_of, [kept = keep(std::move(multiply))](int index) { keep_python_errors([&] { (*kept)(index); }); }});
}

void bind_ranks(py::module_& m) {
  py::class_<EngineRanks>(m, "EngineRanks")
      .def("set_parts_callbacks", &set_parts_callbacks, py::arg("norms"), py::arg("multiply"))
      .def("note_step", of_owner<EngineRanks>(&TorchBridge::audit, &RankAudit::note_step), py::arg("updated"),
           py::arg("hyperparameters"))
      .def("exchange", of_owner<EngineRanks>(&TorchBridge::audit, &RankAudit::exchange), py::arg("numbers"), NoGil())
      .def(
          "hold_unreduced",
          [](const EngineRanks& self, const std::vector<std::int64_t>& addresses) {
            self->hold_unreduced(UnitMap(pointers(addresses)));
          },
          py::arg("addresses"), NoGil())
      .def(
          "holds_unreduced", [](const EngineRanks& self) { return self.engine().holds_unreduced(); }, NoGil())
      .def("set_unsynced", of_owner<EngineRanks>(&TorchBridge::backwards, &Backwards::set_unsynced),
           py::arg("unsynced"), NoGil());
}

}  // namespace

void bind_bridge_autograd(py::module_& m) {
  bind_hooks(m);
  bind_gradients(m);
  bind_home(m);
  bind_ranks(m);
}

}  // namespace noria
