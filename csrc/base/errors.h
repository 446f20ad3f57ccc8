// Defines the three kinds of failure: a mistake of the caller, a defect of noria, and a refusal of the machine.
//
// If an op fails on a lane or a worker, its ticket carries the failure. The next engine call that waits for the ticket
// throws it. No failure is swallowed.
#pragma once

#include <stdexcept>
#include <string>

namespace noria {

/// Reports a mistake of the caller. Thrown before anything is changed. The text has three parts: what was expected,
/// what was found, and what to do about it.
class UsageError : public std::runtime_error {
 public:
  UsageError(const std::string& expected, const std::string& found, const std::string& remedy)
      : std::runtime_error("expected " + expected + "; found " + found + "; remedy: " + remedy) {}
};

/// Reports a defect of noria: a promise of this code does not hold. Always checked, in release builds too.
class InvariantError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Reports that the machine refused a request. The text names the call, the sizes and the policy in force.
class MachineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] void fail_invariant(const char* condition, const char* file, int line, const std::string& detail);

}  // namespace noria

#define NORIA_INVARIANT(condition, detail)                                             \
  do {                                                                                 \
    if (!(condition)) ::noria::fail_invariant(#condition, __FILE__, __LINE__, detail); \
  } while (false)
