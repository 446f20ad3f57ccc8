// Binds itineraries, the planner, what a plan consists of, and hazards. Ids and byte counts are int, words are str.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "bindings/bind_words.h"
#include "plan/hazards.h"
#include "plan/itinerary.h"
#include "plan/planner.h"

namespace py = pybind11;

namespace noria {
namespace {

using Ids = std::vector<std::int32_t>;

template <class Word>
Word parse(const char* what, const std::string& text, const std::vector<std::pair<std::string, Word>>& words) {
  std::string known;
  for (const auto& [name, word] : words) {
    if (name == text) return word;
    known += (known.empty() ? "" : ", ") + name;
  }
  throw UsageError(std::string("a ") + what, "\"" + text + "\"", "use one of " + known);
}

Purpose parse_purpose(const std::string& text) {
  std::vector<std::pair<std::string, Purpose>> words;
  for (Purpose purpose : {Purpose::weights, Purpose::gradient_buffer, Purpose::working_copy, Purpose::held_gradient,
                          Purpose::optimizer_state, Purpose::gradient_sum, Purpose::gradient_scales,
                          Purpose::unreduced_gradient, Purpose::saved_tensor, Purpose::saved_copy, Purpose::peer_copy,
                          Purpose::update_slot, Purpose::record, Purpose::state_slot, Purpose::weights_slot}) {
    words.emplace_back(to_string(purpose), purpose);
  }
  return parse("purpose", text, words);
}

Access::Mode parse_mode(const std::string& text) {
  return parse<Access::Mode>("mode of access", text, {{"read", Access::Mode::read}, {"write", Access::Mode::write}});
}

Rule parse_rule(const std::string& text) {
  return parse<Rule>(
      "rule", text,
      {{"RAW", Rule::read_after_write}, {"WAW", Rule::write_after_write}, {"WAR", Rule::write_after_read}});
}

const char* text_of(Rule rule) {
  return rule == Rule::read_after_write ? "RAW" : rule == Rule::write_after_write ? "WAW" : "WAR";
}

Place parse_place(const std::string& text) {
  const auto colon = text.find(':');
  const auto kind = parse<Place::Kind>("place, such as host or device:0", text.substr(0, colon),
                                       {{"device", Place::Kind::device},
                                        {"host", Place::Kind::host},
                                        {"peer", Place::Kind::peer},
                                        {"file", Place::Kind::file}});
  if (colon == std::string::npos) return {kind, 0};
  const std::string digits = text.substr(colon + 1);
  if (digits.empty() || digits.size() > 9 || digits.find_first_not_of("0123456789") != std::string::npos) {
    throw UsageError("a place, such as host or device:0", "\"" + text + "\"", "give its number after the colon");
  }
  return {kind, std::stoi(digits)};
}

std::vector<UnitId> units_of(const Ids& ids) {
  std::vector<UnitId> units(ids.begin(), ids.end());
  std::sort(units.begin(), units.end());
  units.erase(std::unique(units.begin(), units.end()), units.end());
  return units;
}

Ids ids_of(const std::vector<UnitId>& units) {
  Ids ids;
  for (UnitId unit : units) ids.push_back(unit.value);
  return ids;
}

using ResidentPairs = std::vector<std::pair<std::int32_t, std::int64_t>>;

std::vector<Resident> residents_of(const ResidentPairs& pairs) {
  std::vector<Resident> residents;
  for (const auto& [unit, offset] : pairs) residents.push_back({UnitId(unit), Bytes{offset}});
  return residents;
}

ResidentPairs pairs_of(const std::vector<Resident>& residents) {
  ResidentPairs pairs;
  for (const Resident& resident : residents) pairs.emplace_back(resident.unit.value, resident.offset.count);
  return pairs;
}

std::optional<std::int32_t> value_of(std::optional<ItineraryId> id) {
  return id ? std::optional(id->value) : std::nullopt;
}

template <class Class, class Owner, class Value>
void bytes_property(Class& cls, const char* name, Value Owner::* member) {
  cls.def_property_readonly(name, [member](const Owner& owner) { return (owner.*member).count; });
}
template <class Class, class Owner, class Value>
void id_property(Class& cls, const char* name, Value Owner::* member) {
  cls.def_property_readonly(name, [member](const Owner& owner) { return (owner.*member).value; });
}

void bind_buffers(py::module_& m) {
  py::class_<Buffer> buffer(m, "Buffer");
  buffer.def_property_readonly("place", [](const Buffer& b) { return to_string(b.place); })
      .def_property_readonly("purpose", [](const Buffer& b) { return to_string(b.purpose); });
  bytes_property(buffer, "offset", &Buffer::offset);
  bytes_property(buffer, "bytes", &Buffer::bytes);
  id_property(buffer, "unit", &Buffer::unit);

  py::class_<BufferTable>(m, "BufferTable")
      .def(py::init<>())
      .def(
          "intern",
          [](BufferTable& table, const std::string& place, std::int64_t offset, std::int64_t bytes,
             const std::string& purpose, std::int32_t unit) {
            const Place where = parse_place(place);
            const bool travels = where.kind == Place::Kind::host;
            const Purpose role = parse_purpose(purpose);
            const Format format = role == Purpose::optimizer_state ? Format::master
                                  : travels                        ? Format::travel
                                                                   : Format::compute;
            return table.intern({where, Bytes{offset}, Bytes{bytes}, format, role, UnitId(unit)}).value;
          },
          py::arg("place"), py::arg("offset"), py::arg("bytes"), py::arg("purpose"), py::arg("unit"))
      .def(
          "__getitem__",
          [](const BufferTable& table, std::int32_t id) {
            if (id < 0 || static_cast<std::size_t>(id) >= table.size()) throw py::index_error();
            return table[BufferId(id)];
          },
          py::arg("id"))
      .def("__len__", &BufferTable::size);
}

void bind_ops(py::module_& m) {
  py::class_<Access> access(m, "Access");
  access
      .def(py::init([](std::int32_t buffer, Version version, const std::string& mode) {
             return Access{BufferId(buffer), version, parse_mode(mode)};
           }),
           py::arg("buffer"), py::arg("version"), py::arg("mode"))
      .def_readonly("version", &Access::version)
      .def_property_readonly("mode", [](const Access& a) { return a.mode == Access::Mode::read ? "read" : "write"; });
  id_property(access, "buffer", &Access::buffer);

  py::class_<Op> op(m, "Op");
  op.def(py::init([](std::int64_t id, const std::string& lane, const std::string& verb, std::int32_t unit,
                     std::int64_t bytes, std::int32_t visit, std::vector<Access> accesses) {
           return Op{OpId(id), parse_lane(lane),   parse_verb(verb), UnitId(unit), 0, Bytes{bytes},
                     visit,    std::move(accesses)};
         }),
         py::arg("id"), py::arg("lane"), py::arg("verb"), py::arg("unit") = -1, py::arg("bytes") = 0,
         py::arg("visit") = -1, py::arg("accesses") = std::vector<Access>())
      .def_property_readonly("lane", [](const Op& o) { return to_string(o.lane); })
      .def_property_readonly("verb", [](const Op& o) { return to_string(o.verb); })
      .def_readonly("visit", &Op::visit)
      .def_readonly("accesses", &Op::accesses);
  id_property(op, "id", &Op::id);
  id_property(op, "unit", &Op::unit);
  bytes_property(op, "bytes", &Op::bytes);

  py::class_<Lease> lease(m, "Lease");
  lease.def_property_readonly("place", [](const Lease& l) { return to_string(l.place); })
      .def_readonly("first_op", &Lease::first_op)
      .def_readonly("last_op", &Lease::last_op);
  id_property(lease, "buffer", &Lease::buffer);
  bytes_property(lease, "offset", &Lease::offset);
  bytes_property(lease, "bytes", &Lease::bytes);

  py::class_<Visit> visit(m, "Visit");
  visit
      .def(py::init([](std::int32_t hook, const std::string& phase, const Ids& needs, const Ids& gradients) {
             return Visit{HookId(hook), parse_phase(phase), units_of(needs), units_of(gradients)};
           }),
           py::arg("hook"), py::arg("phase"), py::arg("needs"), py::arg("gradients") = Ids())
      .def_property_readonly("phase", [](const Visit& v) { return to_string(v.phase); })
      .def_property_readonly("needs", [](const Visit& v) { return ids_of(v.needs); })
      .def_property_readonly("gradients", [](const Visit& v) { return ids_of(v.gradients); })
      .def("__eq__", [](const Visit& a, const Visit& b) { return a == b; }, py::is_operator());
  id_property(visit, "hook", &Visit::hook);
}

void bind_planner(py::module_& m) {
  py::class_<UnitFacts> facts(m, "UnitFacts");
  facts
      .def(py::init([](std::string name, std::int64_t weights, std::int64_t gradients, std::int32_t working,
                       std::int32_t held, std::int32_t state) {
             return UnitFacts{std::move(name),   Bytes{weights}, Bytes{gradients},
                              BufferId(working), BufferId(held), BufferId(state)};
           }),
           py::arg("name"), py::arg("weights"), py::arg("gradients"), py::arg("working"), py::arg("held"),
           py::arg("state"))
      .def_readonly("name", &UnitFacts::name);
  bytes_property(facts, "weights", &UnitFacts::weights);
  bytes_property(facts, "gradients", &UnitFacts::gradients);
  id_property(facts, "working", &UnitFacts::working);
  id_property(facts, "held", &UnitFacts::held);
  id_property(facts, "state", &UnitFacts::state);

  py::class_<PlanRequest>(m, "PlanRequest")
      .def(py::init([](std::vector<Visit> visits, std::int64_t arena, std::int32_t window,
                       std::vector<Visit> next_visits, const ResidentPairs& entry, const std::string& device,
                       bool adds) {
             return PlanRequest{parse_place(device),    Budget{Bytes{arena}, window}, std::move(visits),
                                std::move(next_visits), residents_of(entry),          adds};
           }),
           py::arg("visits"), py::arg("arena"), py::arg("window") = 0, py::arg("next_visits") = std::vector<Visit>(),
           py::arg("entry") = ResidentPairs(), py::arg("device") = "device:0", py::arg("adds") = false)
      .def_property_readonly("device", [](const PlanRequest& r) { return to_string(r.device); })
      .def_property_readonly("arena", [](const PlanRequest& r) { return r.budget.arena.count; })
      .def_property_readonly("window", [](const PlanRequest& r) { return r.budget.window; })
      .def_readonly("visits", &PlanRequest::visits)
      .def_readonly("next_visits", &PlanRequest::next_visits)
      .def_readonly("adds", &PlanRequest::adds)
      .def_property_readonly("entry", [](const PlanRequest& r) { return pairs_of(r.entry); });

  py::class_<PassPlan> plan(m, "PassPlan");
  plan.def_readonly("visits", &PassPlan::visits)
      .def_readonly("ops", &PassPlan::ops)
      .def_readonly("leases", &PassPlan::leases)
      .def_property_readonly("exit", [](const PassPlan& p) { return pairs_of(p.exit); })
      .def_readonly("num_fetches", &PassPlan::num_fetches)
      .def_readonly("peak_units", &PassPlan::peak_units)
      .def("to_text", &to_text, py::arg("buffers"), py::arg("unit_names"), NoGil());
  bytes_property(plan, "fetched", &PassPlan::fetched);
  bytes_property(plan, "peak", &PassPlan::peak);

  m.def(
      "plan_pass",
      [](const PlanRequest& request, const std::vector<UnitFacts>& units, BufferTable& buffers) {
        return plan_pass(request, UnitMap(units), buffers);
      },
      py::arg("request"), py::arg("units"), py::arg("buffers"), NoGil());
  m.def(
      "smallest_budget",
      [](const std::vector<Visit>& visits, const std::vector<UnitFacts>& units) {
        const Budget budget = smallest_budget(visits, UnitMap(units));
        return std::pair(budget.arena.count, budget.window);
      },
      py::arg("visits"), py::arg("units"));
}

void bind_hazards(py::module_& m) {
  py::class_<Wait> wait(m, "Wait");
  wait.def(py::init([](std::int64_t on, const std::string& rule, const std::string& giver, const std::string& purpose) {
             return Wait{OpId(on), parse_rule(rule), parse_verb(giver), parse_purpose(purpose)};
           }),
           py::arg("on"), py::arg("rule"), py::arg("giver"), py::arg("purpose"))
      .def_property_readonly("rule", [](const Wait& w) { return text_of(w.rule); })
      .def_property_readonly("giver", [](const Wait& w) { return to_string(w.giver); })
      .def_property_readonly("purpose", [](const Wait& w) { return to_string(w.purpose); });
  id_property(wait, "on", &Wait::on);

  py::class_<Hazards>(m, "Hazards")
      .def(py::init<const BufferTable&, bool>(), py::arg("buffers"), py::arg("assists") = false, py::keep_alive<1, 2>())
      .def("issue", &Hazards::issue, py::arg("op"))
      .def("omit", &Hazards::omit, py::arg("kind"))
      .def_property_readonly("num_remembered", &Hazards::num_remembered);

  m.def(
      "kind_of", [](const Wait& each, const std::string& waiter) { return kind_of(each, parse_verb(waiter)); },
      py::arg("wait"), py::arg("waiter"));
  m.def(
      "derive", [](const std::vector<Op>& ops, const BufferTable& buffers) { return derive(ops, buffers).waits; },
      py::arg("ops"), py::arg("buffers"), NoGil());
  m.def(
      "check",
      [](const std::vector<Op>& ops, std::vector<std::vector<std::int64_t>> waits, const BufferTable& buffers) {
        return check(ops, WaitList{std::move(waits)}, buffers);
      },
      py::arg("ops"), py::arg("waits"), py::arg("buffers"), NoGil());
}

void bind_itinerary(py::module_& m) {
  py::class_<Signature> signature(m, "Signature");
  signature
      .def(py::init([](const std::string& phase, std::int32_t root, bool grad_enabled, bool training, bool accumulating,
                       std::int32_t forward) {
             return Signature{parse_phase(phase), root, grad_enabled, training, accumulating, ItineraryId(forward)};
           }),
           py::arg("phase"), py::arg("root") = 0, py::arg("grad_enabled") = true, py::arg("training") = true,
           py::arg("accumulating") = false, py::arg("forward") = -1)
      .def_property_readonly("phase", [](const Signature& s) { return to_string(s.phase); })
      .def_readonly("root", &Signature::root)
      .def_readonly("grad_enabled", &Signature::grad_enabled)
      .def_readonly("training", &Signature::training)
      .def_readonly("accumulating", &Signature::accumulating)
      .def("__eq__", [](const Signature& a, const Signature& b) { return a == b; }, py::is_operator());
  id_property(signature, "forward", &Signature::forward);

  py::class_<ItineraryBook>(m, "ItineraryBook")
      .def(py::init<>())
      .def(
          "begin", [](ItineraryBook& book, const Signature& s) { return value_of(book.begin(s)); },
          py::arg("signature"))
      .def(
          "announce", [](ItineraryBook& book, const Visit& v) { return value_of(book.announce(v)); }, py::arg("visit"))
      .def(
          "note_gradient", [](ItineraryBook& book, std::int32_t unit) { book.note_gradient(UnitId(unit)); },
          py::arg("unit"))
      .def("end", [](ItineraryBook& book) { return book.end().value; })
      .def("abandon", &ItineraryBook::abandon)
      .def("note_update", &ItineraryBook::note_update)
      .def(
          "successor",
          [](const ItineraryBook& book, std::int32_t id) -> std::optional<std::pair<std::int32_t, bool>> {
            const auto next = book.successor(ItineraryId(id));
            if (!next) return std::nullopt;
            return std::pair(next->itinerary.value, next->after_update);
          },
          py::arg("id"))
      .def("expected_after_update", [](const ItineraryBook& book) { return value_of(book.expected_after_update()); })
      .def(
          "visits", [](const ItineraryBook& book, std::int32_t id) { return book.visits(ItineraryId(id)); },
          py::arg("id"))
      .def(
          "signature", [](const ItineraryBook& book, std::int32_t id) { return book.signature(ItineraryId(id)); },
          py::arg("id"))
      .def("__len__", &ItineraryBook::size)
      .def_property_readonly("position", &ItineraryBook::position);
}

}  // namespace

void bind_plan(py::module_& m) {
  bind_buffers(m);
  bind_ops(m);
  bind_planner(m);
  bind_hazards(m);
  bind_itinerary(m);
}

}  // namespace noria
