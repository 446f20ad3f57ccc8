#include "bindings/python_errors.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include "base/errors.h"

namespace noria {
namespace {

[[noreturn]] void throw_python(const char* type, const char* message) {
  const pybind11::gil_scoped_acquire gil;
  pybind11::object error = pybind11::module_::import("noria._C").attr(type);
  PyErr_SetString(error.ptr(), message);
  python_error carried;
  carried.persist();
  throw std::move(carried);
}

}  // namespace

void as_python_errors(const std::function<void()>& body) {
  try {
    body();
  } catch (const UsageError& error) {
    throw_python("UsageError", error.what());
  } catch (const InvariantError& error) {
    throw_python("InvariantError", error.what());
  } catch (const MachineError& error) {
    throw_python("MachineError", error.what());
  }
}

}  // namespace noria
