// Carries noria's errors through code that only knows Python's: autograd's engine turns any C++ exception into a plain
// RuntimeError, but passes a Python error on as it is. And the other way: a Python exception that an engine ticket
// keeps is thrown to everybody who waits for it, which pybind11's own cannot be.
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

namespace noria {

/// A Python exception that may be copied, kept and thrown any number of times, without the GIL. Leaves a bound function
/// as the exception it carries.
class KeptPythonError final : public std::runtime_error {
 public:
  KeptPythonError(const std::string& text, std::shared_ptr<void> exception)
      : std::runtime_error(text),
        exception_(std::move(exception)) {}
  /// Makes it the current Python error; the GIL is held.
  void restore() const;

 private:
  std::shared_ptr<void> exception_;  // a PyObject; its deleter takes the GIL
};

/// Runs `body` with the GIL; a Python exception leaves as a KeptPythonError.
void keep_python_errors(const std::function<void()>& body);
/// Once, when the module is made.
void register_kept_python_errors();

/// Runs `body` without the GIL, whoever calls; a UsageError, InvariantError or MachineError leaves as the Python
/// exception of that name, a KeptPythonError as the exception it carries.
void as_python_errors(const std::function<void()>& body);

}  // namespace noria
