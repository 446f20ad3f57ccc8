// Binds collectives and the collect lane.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>

#include "base/words.h"
#include "bindings/bind_words.h"
#include "bindings/c10d_collectives.h"
#include "bindings/element_types.h"
#include "comm/collect_lane.h"

namespace py = pybind11;

namespace noria {

void bind_comm(py::module_& m) {
  py::class_<Collectives, std::shared_ptr<Collectives>>(m, "Collectives")
      .def_property_readonly("rank", &Collectives::rank)
      .def_property_readonly("size", &Collectives::size);
  m.def(
      "make_c10d_collectives",
      [](const std::string& shards, const std::string& across, const std::string& numbers, std::vector<int> replica,
         const std::string& device) {
        return make_c10d_collectives(shards, across, numbers, std::move(replica), c10::Device(device));
      },
      py::arg("shards"), py::arg("across"), py::arg("numbers"), py::arg("replica"), py::arg("device"), NoGil());

  py::class_<CollectLane, std::shared_ptr<CollectLane>>(m, "CollectLane")
      .def(py::init<std::shared_ptr<Backend>, std::shared_ptr<Collectives>, std::vector<std::string>, bool>(),
           py::arg("backend"), py::arg("collectives"), py::arg("names"), py::arg("assists"))
      .def(
          "gather",
          [](CollectLane& self, std::int64_t op, std::int32_t unit, std::int64_t all, std::int64_t shard) {
            return self.submit({OpId(op), Lane::collect, Verb::gather, UnitId(unit)},
                               {{{pointer(all), Bytes{shard}}}, {}}, {});
          },
          py::arg("op"), py::arg("unit"), py::arg("all"), py::arg("shard"), NoGil())
      .def(
          "reduce",
          [](CollectLane& self, std::int64_t op, std::int32_t unit, std::int64_t all, std::int64_t shard,
             const std::string& type, std::int64_t scratch, std::int64_t onto, std::int64_t part) {
            Collective collective;
            Reduction& reduction = collective.reduction;
            reduction.all = pointer(all);
            reduction.shard = Bytes{shard};
            reduction.type = element_type(type);
            reduction.scratch = pointer(scratch);
            reduction.part = pointer(part);
            if (onto != 0) {
              const Bytes own = Bytes{shard} * self.shards().rank;
              reduction.add.push_back({pointer(all) + own.count, pointer(onto), Bytes{shard}});
            }
            return self.submit({OpId(op), Lane::collect, Verb::reduce, UnitId(unit)}, std::move(collective), {});
          },
          py::arg("op"), py::arg("unit"), py::arg("all"), py::arg("shard"), py::arg("type"), py::arg("scratch"),
          py::arg("onto"), py::arg("part"), NoGil())
      .def(
          "exchange",
          [](CollectLane& self, std::vector<std::int64_t> numbers) {
            return self.exchange(std::move(numbers), SyncPoint::other).numbers;
          },
          py::arg("numbers"), NoGil())
      .def("close", &CollectLane::close, NoGil());
}

}  // namespace noria
