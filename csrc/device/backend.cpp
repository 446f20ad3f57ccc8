#include "device/backend.h"

namespace noria {

Bytes Transfer::bytes() const {
  Bytes total;
  for (const CopySpan& copy : copies) total += copy.bytes;
  for (const auto& [memory, bytes] : poison) total += bytes;
  return total;
}

}  // namespace noria
