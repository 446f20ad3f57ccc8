#include "bindings/python_errors.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <optional>

#include "base/errors.h"

namespace noria {
namespace {

[[noreturn]] void throw_current() {
  python_error carried;
  carried.persist();
  throw std::move(carried);
}

[[noreturn]] void throw_python(const char* type, const char* message) {
  const pybind11::gil_scoped_acquire gil;
  pybind11::object error = pybind11::module_::import("noria._C").attr(type);
  PyErr_SetString(error.ptr(), message);
  throw_current();
}

}  // namespace

void KeptPythonError::restore() const {
  auto* exception = static_cast<PyObject*>(exception_.get());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception);
}

void keep_python_errors(const std::function<void()>& body) {
  const pybind11::gil_scoped_acquire gil;
  try {
    body();
  } catch (const pybind11::error_already_set& error) {
    PyObject* exception = error.value().inc_ref().ptr();
    if (error.trace()) PyException_SetTraceback(exception, error.trace().ptr());
    throw KeptPythonError(error.what(), std::shared_ptr<void>(exception, [](void* held) {
                            const pybind11::gil_scoped_acquire gil;
                            Py_DECREF(static_cast<PyObject*>(held));
                          }));
  }
}

void register_kept_python_errors() {
  pybind11::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const KeptPythonError& error) {
      error.restore();
    }
  });
}

std::optional<SteppingOptimizer> stepping_optimizer() try {
  namespace py = pybind11;
  const py::gil_scoped_acquire gil;
  PyFrameObject* const top = PyEval_GetFrame();  // borrowed; null on a thread that runs no Python
  if (top == nullptr) return {};
  const py::object known = py::module_::import("torch.optim").attr("Optimizer");
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(top));
  std::optional<SteppingOptimizer> found;
  for (; !frame.is_none(); frame = frame.attr("f_back")) {
    if (frame.attr("f_code").attr("co_name").cast<std::string>() != "step") continue;
    const py::object self = frame.attr("f_locals").attr("get")("self");
    const py::object cls = py::type::of(self);
    if (py::isinstance(self, known)) {
      if (!found) found = SteppingOptimizer{cls.attr("__name__").cast<std::string>(), py::hasattr(self, "_noria")};
    } else if (cls.attr("__module__").cast<std::string>().starts_with("noria.")) {
      return {};  // noria's own step runs a closure
    }
  }
  return found;
} catch (const std::exception&) {  // an object that answers nothing: torch's own error follows
  return {};
}

void as_python_errors(const std::function<void()>& body) {
  // An operator holds the GIL if numpy or Python itself asked for memory. Another thread may need the GIL before it can
  // release the engine.
  std::optional<pybind11::gil_scoped_release> no_gil;
  if (PyGILState_Check() != 0) no_gil.emplace();
  try {
    body();
  } catch (const UsageError& error) {
    throw_python("UsageError", error.what());
  } catch (const InvariantError& error) {
    throw_python("InvariantError", error.what());
  } catch (const MachineError& error) {
    throw_python("MachineError", error.what());
  } catch (const KeptPythonError& error) {
    const pybind11::gil_scoped_acquire gil;
    error.restore();
    throw_current();
  }
}

}  // namespace noria
