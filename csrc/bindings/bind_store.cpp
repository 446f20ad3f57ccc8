// Binds arenas, records in files, and the lending of device memory to other processes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <tuple>
#include <utility>

#include "bindings/bind_words.h"
#include "bindings/home_use.h"
#include "store/arena.h"
#include "store/file_home.h"
#include "store/file_store.h"
#include "store/lending.h"

namespace py = pybind11;

namespace noria {
namespace {

// The calling thread watches without the GIL. It takes the GIL to check for Ctrl-C and to report progress.
void populate_arena(Arena& arena, const py::object& told, int num_threads, bool ask_kernel) {
  const auto look_up = [&told](Bytes populated) {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!told.is_none()) told(populated.count);
  };
  const py::gil_scoped_release no_gil;
  arena.populate(look_up, {num_threads, ask_kernel});
}

void bind_lending(py::module_& m) {
  using Ms = std::chrono::milliseconds;
  py::class_<Lender>(m, "Lender")
      .def(py::init<int>(), py::arg("rank"))
      .def_property_readonly("address", &Lender::address)
      .def(
          "lend",
          [](Lender& self, const SharedMemory& arena,
             const std::vector<std::tuple<int, std::int64_t, std::int64_t>>& loans, std::int64_t timeout_ms) {
            std::vector<Loan> all;
            for (const auto& [borrower, offset, bytes] : loans) all.push_back({borrower, Bytes{offset}, Bytes{bytes}});
            self.lend(arena, all, Ms(timeout_ms));
          },
          py::arg("arena"), py::arg("loans"), py::arg("timeout_ms"), NoGil())
      .def(
          "ask_back", [](Lender& self, int borrower, std::int64_t left) { self.ask_back(borrower, Bytes{left}); },
          py::arg("borrower"), py::arg("left"), NoGil())
      .def(
          "lent", [](const Lender& self, int borrower) { return self.lent(borrower).count; }, py::arg("borrower"),
          NoGil())
      .def("leave", &Lender::leave, NoGil())
      .def("close", &Lender::close, NoGil());

  py::class_<Borrower>(m, "Borrower")
      .def(py::init([](int rank, int lender, const std::string& address, std::int64_t timeout_ms) {
             const py::gil_scoped_release no_gil;
             return std::make_unique<Borrower>(rank, lender, address, Ms(timeout_ms));
           }),
           py::arg("rank"), py::arg("lender"), py::arg("address"), py::arg("timeout_ms"))
      .def(
          "receive",
          [](Borrower& self, std::int64_t timeout_ms) {
            const Borrowed got = self.receive(Ms(timeout_ms));
            return std::make_tuple(got.arena, got.offset.count, got.bytes.count);
          },
          py::arg("timeout_ms"), NoGil())
      .def(
          "allowed", [](const Borrower& self) { return self.allowed().count; }, NoGil())
      .def(
          "give_back", [](Borrower& self, std::int64_t left) { self.give_back(Bytes{left}); }, py::arg("left"), NoGil())
      .def("check", &Borrower::check, NoGil())
      .def("close", &Borrower::close, NoGil());
}

DoorKind parse_door(const std::string& door) {
  if (door == "auto") return DoorKind::best;
  if (door == "io_uring") return DoorKind::uring;
  if (door == "threads") return DoorKind::threads;
  throw UsageError("a door to files", "\"" + door + "\"", "use auto, io_uring or threads");
}

FileStoreOptions file_options(const std::string& door, std::shared_ptr<Pace> pace, std::shared_ptr<FileFaults> faults) {
  FileStoreOptions options;
  options.door = parse_door(door);
  if (pace) options.pace = std::move(pace);
  if (faults) options.faults = std::move(faults);
  return options;
}

void bind_files(py::module_& m) {
  m.def("uring_absent_reason", &uring_absent_reason);
  py::class_<FileStore, std::shared_ptr<FileStore>>(m, "FileStore")
      .def(py::init([](const std::vector<std::string>& folders, const std::string& door, int depth, std::int64_t part,
                       std::shared_ptr<Pace> pace, std::shared_ptr<FileFaults> faults) {
             FileStoreOptions options = file_options(door, std::move(pace), std::move(faults));
             options.depth = depth;
             options.part = Bytes{part};
             const py::gil_scoped_release no_gil;
             return std::make_shared<FileStore>(folders, options);
           }),
           py::arg("folders"), py::arg("door") = "auto", py::arg("depth") = FileStoreOptions{}.depth,
           py::arg("part") = FileStoreOptions{}.part.count, py::arg("pace") = py::none(),
           py::arg("faults") = py::none())
      .def(
          "add", [](FileStore& store, std::int64_t bytes) { return store.add(Bytes{bytes}); }, py::arg("bytes"))
      .def(
          "add_mapped", [](FileStore& store, std::int64_t bytes) { return store.add_mapped(Bytes{bytes}); },
          py::arg("bytes"))
      .def("reserve", &FileStore::reserve, NoGil())
      .def(
          "map",
          [](FileStore& store, int record, const std::shared_ptr<Arena>& arena, std::int64_t offset) {
            store.map(record, arena, Bytes{offset});
          },
          py::arg("record"), py::arg("arena"), py::arg("offset"), NoGil())
      .def(
          "take_in",
          [](FileStore& store, Arena& arena) {
            const auto forget = [&] { store.forget_mappings(static_cast<int>(arena.elsewhere().size())); };
            try {
              arena.take_in([&](int record, std::byte* memory) { store.read(record, memory); });
            } catch (...) {
              forget();
              throw;
            }
            forget();
          },
          py::arg("arena"), NoGil())
      .def(
          "read", [](FileStore& store, int record, Address memory) { store.read(record, pointer(memory)); },
          py::arg("record"), py::arg("memory"), NoGil())
      .def(
          "write", [](FileStore& store, int record, Address memory) { store.write(record, pointer(memory)); },
          py::arg("record"), py::arg("memory"), NoGil())
      .def(
          "expect_memory",
          [](FileStore& store, Address memory, std::int64_t bytes) {
            store.expect_memory(pointer(memory), Bytes{bytes});
          },
          py::arg("memory"), py::arg("bytes"), NoGil())
      .def_property_readonly("file_bytes", [](const FileStore& store) { return store.file_bytes().count; })
      .def_property_readonly("door", &FileStore::door_name)
      .def_property_readonly("notes", &FileStore::notes);
  py::class_<SharedPages>(m, "SharedPages")
      .def(py::init([](std::int64_t bytes) { return std::make_unique<SharedPages>(Bytes{bytes}); }), py::arg("bytes"),
           NoGil())
      .def_property_readonly("address", [](const SharedPages& pages) { return address_of(pages.data()); });
  py::class_<FileHome, std::shared_ptr<FileHome>>(m, "FileHome")
      .def(py::init([](const std::vector<std::string>& folders, const std::vector<std::int64_t>& sizes, int num_slots,
                       std::shared_ptr<Pace> pace, std::shared_ptr<FileFaults> faults, const std::string& door) {
             std::vector<Bytes> bytes;
             for (const std::int64_t size : sizes) bytes.push_back(Bytes{size});
             const FileStoreOptions options = file_options(door, std::move(pace), std::move(faults));
             const py::gil_scoped_release no_gil;
             return std::make_shared<FileHome>(folders, bytes, num_slots, options);
           }),
           py::arg("folders"), py::arg("sizes"), py::arg("num_slots"), py::arg("pace") = py::none(),
           py::arg("faults") = py::none(), py::arg("door") = "auto")
      // Shares the home itself: tensors over the addresses keep the memory that is there.
      .def_property_readonly(
          "addresses",
          [](const std::shared_ptr<FileHome>& home) { return std::shared_ptr<Arena>(home, home->addresses().get()); })
      .def(
          "offset_of", [](const FileHome& home, int record) { return home.offset_of(record).count; }, py::arg("record"))
      .def_property_readonly("slot_bytes", [](const FileHome& home) { return home.slot_bytes().count; })
      .def_property_readonly("num_slots", &FileHome::num_slots)
      .def_property_readonly("file_bytes", [](const FileHome& home) { return home.store().file_bytes().count; })
      .def_property_readonly("door", [](const FileHome& home) { return home.store().door_name(); })
      .def_property_readonly("notes", [](const FileHome& home) { return home.store().notes(); });
}

}  // namespace

void bind_store(py::module_& m) {
  m.def("num_usable_cpus", &num_usable_cpus);
  py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena")
      .def(py::init([](std::int64_t bytes, const std::vector<std::pair<std::int64_t, std::int64_t>>& elsewhere) {
             std::vector<ByteRange> ranges;
             for (const auto& [begin, end] : elsewhere) ranges.push_back({Bytes{begin}, Bytes{end}});
             return std::make_shared<Arena>(Bytes{bytes}, std::move(ranges));
           }),
           py::arg("bytes"), py::arg("elsewhere") = std::vector<std::pair<std::int64_t, std::int64_t>>())
      .def(
          "register_with",
          [](Arena& arena, std::shared_ptr<Backend> backend, const std::string& use) {
            return arena.register_with(std::move(backend), parse_home_use(use));
          },
          py::arg("backend"), py::arg("use") = "device", NoGil())
      .def("prefer_node", &Arena::prefer_node, py::arg("node"), NoGil())
      .def("populate", &populate_arena, py::arg("told") = py::none(), py::arg("num_threads") = 0,
           py::arg("ask_kernel") = true)
      .def("allow_fork", &Arena::allow_fork, NoGil())
      .def("close", &Arena::close, NoGil())
      .def_property_readonly("data", [](const Arena& arena) { return address_of(arena.data()); })
      .def_property_readonly("bytes", [](const Arena& arena) { return arena.memory_bytes().count; })
      .def_property_readonly("mapped_bytes", [](const Arena& arena) { return arena.mapped_bytes().count; })
      .def_property_readonly("registered", &Arena::registered);

  bind_files(m);
  bind_lending(m);
}

}  // namespace noria
