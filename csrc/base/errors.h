// The three kinds of failure: the caller's, ours, the machine's.
//
// A failure on a lane or worker travels in the ticket it should have given and is thrown at the next engine call that
// waits for it; nothing is swallowed.
#pragma once

#include <stdexcept>
#include <string>

namespace noria {

/// The caller's mistake. Raised before anything is changed. The text has three parts: what was expected, what was
/// found, what to do about it.
class UsageError : public std::runtime_error {
 public:
  UsageError(const std::string& expected, const std::string& found, const std::string& remedy)
      : std::runtime_error("expected " + expected + "; found " + found + "; remedy: " + remedy) {}
};

/// Our mistake: a promise of this code does not hold. Always checked, in release builds too.
class InvariantError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// The machine's refusal: names the call, the sizes and the policy in force.
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
