// Pace says how long the ops of a machine are held up. This one holds up none: it is the pace of the machine itself.
// Tests and benchmarks use another one (testing/slow_pace.h).
//
// Threads: any thread may call every member.
#pragma once

#include <cstdint>

#include "base/bytes.h"
#include "base/words.h"

namespace noria {

struct Transfer;

class Pace {
 public:
  virtual ~Pace() = default;

  /// Returns how many us the next op waits before it works.
  virtual std::int64_t before_us(Lane /*lane*/, Verb /*verb*/) { return 0; }
  /// Returns how many us a copy lane waits after an op.
  virtual std::int64_t after_us(Lane /*lane*/) { return 0; }

  /// Returns the shortest time in ns that an op may take on the host.
  virtual std::int64_t least_ns(Lane /*lane*/, const Transfer& /*transfer*/) const { return 0; }
  virtual std::int64_t least_ns(Lane /*lane*/, Bytes /*bytes*/) const { return 0; }

  /// Returns true if memory that is free is overwritten.
  virtual bool poisons() const { return false; }
  /// Called when a part of an update is done. May throw: the update then breaks off there.
  virtual void part_done() {}
};

}  // namespace noria
