#include "settings.h"

#include <algorithm>

namespace pretend_gpu {

Settings& settings() {
  static Settings* the_settings = new Settings;  // streams' threads may outlive static objects; so below
  return *the_settings;
}

Launches& launches() {
  static Launches* the_launches = new Launches;
  return *the_launches;
}

void Launches::launched(const std::string& name) {
  const std::lock_guard lock(mutex_);
  ++seen_.asynchronous[name];
  seen_.most_ahead = std::max(seen_.most_ahead, ++launched_ - finished_);
}

void Launches::finished() {
  const std::lock_guard lock(mutex_);
  ++finished_;
}

void Launches::synchronized(const std::string& name) {
  const std::lock_guard lock(mutex_);
  ++seen_.synchronous[name];
}

void Launches::crossed_link(std::int64_t bytes_read, std::int64_t bytes_written) {
  const std::lock_guard lock(mutex_);
  seen_.link_bytes_read += bytes_read;
  seen_.link_bytes_written += bytes_written;
}

Launches::Seen Launches::seen() const {
  const std::lock_guard lock(mutex_);
  return seen_;
}

void Launches::reset() {
  const std::lock_guard lock(mutex_);
  seen_ = {};
}

}  // namespace pretend_gpu
