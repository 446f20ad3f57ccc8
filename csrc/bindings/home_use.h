// Reads the word by which Python says what accesses a range of the home.
#pragma once

#include <string>

#include "base/errors.h"
#include "device/backend.h"

namespace noria {

inline HomeUse parse_home_use(const std::string& word) {
  if (word == "copies") return HomeUse::copies;
  if (word == "device") return HomeUse::device;
  throw UsageError("a use of home memory: \"copies\" or \"device\"", "\"" + word + "\"", "correct the name");
}

}  // namespace noria
