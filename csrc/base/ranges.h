// Ranges holds a set of bytes as disjoint ranges.
#pragma once

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "base/bytes.h"

namespace noria {

class Ranges {
 public:
  using Range = std::pair<Bytes, Bytes>;  // begin, end

  bool empty() const { return ends_.empty(); }
  void clear() { ends_.clear(); }
  auto begin() const { return ends_.begin(); }
  auto end() const { return ends_.end(); }

  void add(Bytes begin, Bytes end) {
    if (begin >= end) return;
    auto next = ends_.upper_bound(begin);
    if (next != ends_.begin() && std::prev(next)->second >= begin) {
      --next;
      begin = next->first;
      end = std::max(end, next->second);
    }
    while (next != ends_.end() && next->first <= end) {
      end = std::max(end, next->second);
      next = ends_.erase(next);
    }
    ends_.emplace(begin, end);
  }

  void remove(Bytes begin, Bytes end) {
    for (const auto& [from, to] : within(begin, end)) {
      const auto found = std::prev(ends_.upper_bound(from));
      const Range whole = *found;
      ends_.erase(found);
      if (whole.first < from) ends_.emplace(whole.first, from);
      if (to < whole.second) ends_.emplace(to, whole.second);
    }
  }

  /// Returns the parts of [begin, end) that are in the set.
  std::vector<Range> within(Bytes begin, Bytes end) const {
    std::vector<Range> found;
    auto next = ends_.upper_bound(begin);
    if (next != ends_.begin()) --next;
    for (; next != ends_.end() && next->first < end; ++next) {
      const Bytes from = std::max(begin, next->first);
      const Bytes to = std::min(end, next->second);
      if (from < to) found.emplace_back(from, to);
    }
    return found;
  }

  /// Returns the parts of [begin, end) that are not in the set.
  std::vector<Range> missing(Bytes begin, Bytes end) const {
    std::vector<Range> found;
    for (const auto& [from, to] : within(begin, end)) {
      if (begin < from) found.emplace_back(begin, from);
      begin = to;
    }
    if (begin < end) found.emplace_back(begin, end);
    return found;
  }

 private:
  std::map<Bytes, Bytes> ends_;  // begin -> end; the ranges are disjoint, and no two touch
};

}  // namespace noria
