#include "store/leases.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "base/errors.h"

namespace noria {

Leases::Leases(std::shared_ptr<Backend> backend, Bytes arena)
    : backend_(std::move(backend)),
      arena_(backend_->allocate(arena)),
      bytes_(arena) {}

Leases::~Leases() {
  if (arena_ == nullptr) return;
  try {
    backend_->free(arena_);
  } catch (...) {  // NOLINT(bugprone-empty-catch): a failed device fails here too, and reports it elsewhere
  }
}

void Leases::give_up() {
  NORIA_INVARIANT(live_.empty(), "the window is given up while a range of it is leased");
  if (arena_ != nullptr) backend_->free(std::exchange(arena_, nullptr));
}

void Leases::take_again() {
  if (arena_ == nullptr) arena_ = backend_->allocate(bytes_);
}

void Leases::resize(Bytes arena) {
  NORIA_INVARIANT(arena_ == nullptr, "a window that is there changes its size");
  bytes_ = arena;
}

std::byte* Leases::take(Bytes offset, Bytes bytes, bool is_weights) {
  NORIA_INVARIANT(arena_ != nullptr, "the window has been given up");
  const Bytes end = offset + bytes;
  NORIA_INVARIANT(offset >= Bytes{0} && end <= bytes_, "lease at " + std::to_string(offset.count) + " of " +
                                                           to_string(bytes) + " leaves an arena of " +
                                                           to_string(bytes_));
  const auto next = live_.lower_bound(offset);
  NORIA_INVARIANT(next == live_.end() || end <= next->first, "lease overlaps the one behind it");
  NORIA_INVARIANT(next == live_.begin() || std::prev(next)->first + std::prev(next)->second.bytes <= offset,
                  "lease overlaps the one before it");
  live_.emplace(offset, Live{bytes, is_weights});
  peak_ = std::max(peak_, end);
  num_units_ += is_weights ? 1 : 0;
  peak_units_ = std::max(peak_units_, num_units_);
  return at(offset);
}

void Leases::release(Bytes offset) {
  const auto found = live_.find(offset);
  NORIA_INVARIANT(found != live_.end(), "no lease at offset " + std::to_string(offset.count));
  num_units_ -= found->second.is_weights ? 1 : 0;
  live_.erase(found);
}

}  // namespace noria
