#include "device/backend.h"

namespace noria {

Bytes Transfer::bytes() const {
  Bytes total;
  for (const CopySpan& copy : copies) total += copy.bytes;
  for (const auto& [memory, bytes] : poison) total += bytes;
  return total;
}

void wait_for_all(const std::vector<Ticket>& tickets) {
  std::exception_ptr failure;
  for (const Ticket& ticket : tickets) {
    try {
      ticket->wait_passed();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace noria
