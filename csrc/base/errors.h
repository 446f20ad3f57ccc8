// Defines the three kinds of failure: a mistake of the caller, a defect of noria, and a refusal of the machine.
//
// If an op fails on a lane or a worker, its ticket carries the failure. The next engine call that waits for the ticket
// throws it. No failure is swallowed.
#pragma once

#include <stdexcept>
#include <string>

namespace noria {

/// Returns the text of a UsageError: a sentence with what was expected and what was found, then what to do about it.
/// Example: "noria expected a lane, but found "fetsch". Remedy: use one of compute, fetch, drain".
inline std::string usage_text(const std::string& expected, const std::string& found, const std::string& remedy) {
  return "noria expected " + expected + ", but found " + found + ". Remedy: " + remedy;
}

/// Reports a mistake of the caller. Thrown before anything is changed. `usage_text` makes its text.
class UsageError : public std::runtime_error {
 public:
  UsageError(const std::string& expected, const std::string& found, const std::string& remedy)
      : std::runtime_error(usage_text(expected, found, remedy)) {}
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
