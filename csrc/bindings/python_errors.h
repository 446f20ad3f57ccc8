// Carries noria's errors through code that only knows Python's, and Python's errors through noria.
//
// Autograd's engine turns any C++ exception into a plain RuntimeError, but passes a Python error on unchanged. In the
// other direction, an engine ticket may keep a Python exception and throw it to every waiter. pybind11's own exception
// can be raised in Python only once.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

namespace noria {

/// Holds a Python exception that may be copied, kept and thrown any number of times, without the GIL. If it leaves a
/// bound function, Python sees the exception that it carries.
class KeptPythonError final : public std::runtime_error {
 public:
  KeptPythonError(const std::string& text, std::shared_ptr<void> exception)
      : std::runtime_error(text),
        exception_(std::move(exception)) {}
  /// Makes it the current Python error.
  /// Threads: the GIL is held.
  void restore() const;

 private:
  std::shared_ptr<void> exception_;  // a PyObject; its deleter takes the GIL
};

/// Runs `body` with the GIL. A Python exception leaves as a KeptPythonError.
void keep_python_errors(const std::function<void()>& body);
/// Registers the translation of KeptPythonError. Order: once, when the extension module is made.
void register_kept_python_errors();

/// Describes an optimizer whose own `step` runs, and not noria's. `is_wrapped`: noria has wrapped the optimizer, but
/// something has kept its step from before.
struct SteppingOptimizer {
  std::string name;
  bool is_wrapped = false;
};
/// Returns the optimizer that steps on this thread; nothing if none does. Takes the GIL.
std::optional<SteppingOptimizer> stepping_optimizer();

/// Runs `body` without the GIL, even if the caller holds it. A UsageError, InvariantError or MachineError leaves as the
/// Python exception of that name, a KeptPythonError as the exception that it carries.
void as_python_errors(const std::function<void()>& body);

}  // namespace noria
