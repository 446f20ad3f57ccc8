// Helps tests of files: a folder that goes with the test, and the text of an error.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>

namespace noria {

/// Makes a folder for this user alone, in `above`, and removes it with all that is in it.
class OwnFolder {
 public:
  explicit OwnFolder(const std::string& above = "/var/tmp") {
    std::string name = above + "/noria-XXXXXX";
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp in " + above);
    path = name;
  }
  ~OwnFolder() { std::filesystem::remove_all(path); }
  OwnFolder(const OwnFolder&) = delete;  // one owner per folder
  OwnFolder& operator=(const OwnFolder&) = delete;

  std::string path;
};

/// Returns the text of what `work` throws; empty if it throws nothing.
inline std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace noria
