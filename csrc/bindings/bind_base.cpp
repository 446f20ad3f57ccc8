// Binds exceptions, the vocabulary, and traces.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/bytes.h"
#include "base/errors.h"
#include "base/trace.h"
#include "base/words.h"
#include "bindings/bind_words.h"

namespace py = pybind11;

namespace noria {
namespace {

Span make_span(std::int64_t op, const std::string& lane, const std::string& verb, std::int32_t unit,
               std::int64_t start_us, std::int64_t end_us, std::int64_t bytes, const std::vector<std::int64_t>& waits) {
  Span span{OpId(op), parse_lane(lane), parse_verb(verb), UnitId(unit), start_us, end_us, Bytes{bytes}, {}};
  for (std::int64_t wait : waits) span.waits.emplace_back(wait);
  return span;
}

std::vector<std::int64_t> wait_ids(const Span& span) {
  std::vector<std::int64_t> ids;
  for (OpId wait : span.waits) ids.push_back(wait.value);
  return ids;
}

template <class Word>
py::tuple words(int count) {
  py::tuple all(count);
  for (int i = 0; i < count; ++i) all[i] = py::str(std::string(to_string(static_cast<Word>(i))));
  return all;
}

}  // namespace

void bind_base(py::module_& m) {
  py::register_exception<UsageError>(m, "UsageError", PyExc_RuntimeError);
  py::register_exception<InvariantError>(m, "InvariantError", PyExc_RuntimeError);
  py::register_exception<MachineError>(m, "MachineError", PyExc_RuntimeError);
  for (const char* const name : {"UsageError", "MachineError"}) {
    m.attr(name).attr("__module__") = "noria";  // their public names, also in tracebacks and pickles
  }
  m.attr("UsageError").attr("__doc__") =
      "The caller's mistake, raised before anything is changed: noria expected ..., but found .... Remedy: ...";
  m.attr("InvariantError").attr("__doc__") = "A promise of noria's own code does not hold: a defect, please report it.";
  m.attr("MachineError").attr("__doc__") =
      "The machine refuses or breaks what noria asks of it. Names the call and the sizes.";

  m.attr("LANES") = words<Lane>(kNumLanes);
  m.attr("VERBS") = words<Verb>(kNumVerbs);
  m.attr("TENSOR_ALIGNMENT") = kTensorAlignment.count;
  m.def("format_bytes", [](std::int64_t bytes) { return to_string(Bytes{bytes}); }, py::arg("bytes"));
  m.def("clock_us", &clock_us);

  py::class_<Span>(m, "Span")
      .def(py::init(&make_span), py::arg("op"), py::arg("lane"), py::arg("verb"), py::arg("unit"), py::arg("start_us"),
           py::arg("end_us"), py::arg("bytes") = 0, py::arg("waits") = std::vector<std::int64_t>())
      .def_property_readonly("op", [](const Span& span) { return span.op.value; })
      .def_property_readonly("lane", [](const Span& span) { return to_string(span.lane); })
      .def_property_readonly("verb", [](const Span& span) { return to_string(span.verb); })
      .def_property_readonly("unit", [](const Span& span) { return span.unit.value; })
      .def_readonly("start_us", &Span::start_us)
      .def_readonly("end_us", &Span::end_us)
      .def_property_readonly("bytes", [](const Span& span) { return span.bytes.count; })
      .def_property_readonly("waits", &wait_ids);

  py::class_<Trace, std::shared_ptr<Trace>>(m, "Trace")
      .def(py::init<std::size_t>(), py::arg("capacity"))
      .def("add", &Trace::add, py::arg("span"), NoGil())
      .def("note", &Trace::note, py::arg("text"), NoGil())
      .def("spans", &Trace::spans, NoGil())
      .def("clear", &Trace::clear, NoGil())
      .def("chrome_json", &Trace::chrome_json, py::arg("unit_names"), NoGil())
      .def_property_readonly("num_dropped", &Trace::num_dropped)
      .def_property_readonly("now_us", &Trace::now_us);
}

}  // namespace noria
