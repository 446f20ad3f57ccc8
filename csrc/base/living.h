// Living counts the objects of a class that exist in this process. Tests and soak runs use it to find leaked objects.
//
// `class Backend : Living<Backend>` counts backends. Threads: any.
#pragma once

#include <atomic>
#include <cstdint>

namespace noria {

template <class Owner>
class Living {
 public:
  static std::int64_t count() { return count_; }

 private:
  friend Owner;
  Living() { ++count_; }
  Living(const Living&) { ++count_; }
  Living& operator=(const Living&) = default;
  ~Living() { --count_; }

  static inline std::atomic<std::int64_t> count_ = 0;
};

}  // namespace noria
