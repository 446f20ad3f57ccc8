// Carries noria's errors through code that only knows Python's: autograd's engine turns any C++ exception into a plain
// RuntimeError, but passes a Python error on as it is.
#pragma once

#include <functional>

namespace noria {

/// Runs `body`, called without the GIL; a UsageError, InvariantError or MachineError leaves as the Python exception of
/// that name.
void as_python_errors(const std::function<void()>& body);

}  // namespace noria
