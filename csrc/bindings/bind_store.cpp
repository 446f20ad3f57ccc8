// The home's ground: layouts as pure functions, and arenas.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <tuple>
#include <utility>

#include "bindings/home_use.h"
#include "store/arena.h"
#include "store/layout.h"

namespace py = pybind11;

namespace noria {
namespace {

// The calling thread looks on without the GIL, and takes it to hear of Ctrl-C and to tell.
void populate_arena(Arena& arena, const py::object& told, int num_threads, bool ask_kernel) {
  const auto look_up = [&told](Bytes populated) {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!told.is_none()) told(populated.count);
  };
  const py::gil_scoped_release no_gil;
  arena.populate(look_up, {num_threads, ask_kernel});
}

}  // namespace

void bind_store(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;

  py::class_<UnitLayout>(m, "UnitLayout")
      .def_property_readonly("slots",
                             [](const UnitLayout& layout) {
                               std::vector<std::pair<std::int64_t, std::int64_t>> slots;
                               for (const TensorSlot& slot : layout.slots) {
                                 slots.emplace_back(slot.offset.count, slot.bytes.count);
                               }
                               return slots;
                             })
      .def_property_readonly("total", [](const UnitLayout& layout) { return layout.total.count; });
  m.def(
      "lay_out_unit",
      [](const std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>& tensors) {
        std::vector<TensorSpec> specs;
        for (const auto& [elements, item_bytes, storage] : tensors) specs.push_back({elements, item_bytes, storage});
        return lay_out_unit(specs);
      },
      py::arg("tensors"));

  py::class_<HomeLayout>(m, "HomeLayout")
      .def_property_readonly("slots",
                             [](const HomeLayout& layout) {
                               std::vector<std::tuple<std::int32_t, std::string, std::int64_t, std::int64_t>> slots;
                               for (const HomeSlot& slot : layout.slots) {
                                 slots.emplace_back(slot.unit.value, slot.purpose, slot.offset.count, slot.bytes.count);
                               }
                               return slots;
                             })
      .def_property_readonly("ledger",
                             [](const HomeLayout& layout) {
                               std::vector<std::pair<std::string, std::int64_t>> rows;
                               for (const LedgerRow& row : layout.ledger)
                                 rows.emplace_back(row.purpose, row.bytes.count);
                               return rows;
                             })
      .def_property_readonly("total", [](const HomeLayout& layout) { return layout.total.count; });
  m.def(
      "lay_out_home",
      [](const std::vector<std::tuple<std::int32_t, std::string, std::int64_t>>& arrays) {
        std::vector<HomeArray> requests;
        for (const auto& [unit, purpose, bytes] : arrays) requests.push_back({UnitId(unit), purpose, Bytes{bytes}});
        return lay_out_home(requests);
      },
      py::arg("arrays"));

  m.def("num_usable_cpus", &num_usable_cpus);
  py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena")
      .def(py::init([](std::int64_t bytes) { return std::make_shared<Arena>(Bytes{bytes}); }), py::arg("bytes"))
      .def(
          "register_with",
          [](Arena& arena, std::shared_ptr<Backend> backend, const std::string& use) {
            return arena.register_with(std::move(backend), parse_home_use(use));
          },
          py::arg("backend"), py::arg("use") = "device", Release())
      .def("prefer_node", &Arena::prefer_node, py::arg("node"), Release())
      .def("populate", &populate_arena, py::arg("told") = py::none(), py::arg("num_threads") = 0,
           py::arg("ask_kernel") = true)
      .def("close", &Arena::close, Release())
      .def_property_readonly("data", [](const Arena& arena) { return reinterpret_cast<std::uintptr_t>(arena.data()); })
      .def_property_readonly("bytes", [](const Arena& arena) { return arena.bytes().count; })
      .def_property_readonly("mapped_bytes", [](const Arena& arena) { return arena.mapped_bytes().count; })
      .def_property_readonly("registered", &Arena::registered);
}

}  // namespace noria
