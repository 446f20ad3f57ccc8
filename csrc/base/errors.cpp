#include "base/errors.h"

namespace noria {

void fail_invariant(const char* condition, const char* file, int line, const std::string& detail) {
  throw InvariantError(detail + " (" + condition + " does not hold at " + file + ":" + std::to_string(line) +
                       "): a defect of noria, please report it");
}

}  // namespace noria
