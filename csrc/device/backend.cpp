#include "device/backend.h"

#include "base/errors.h"

namespace noria {

Bytes Transfer::bytes() const {
  Bytes total;
  for (const CopySpan& copy : copies) total += copy.bytes;
  for (const auto& [memory, bytes] : poison) total += bytes;
  return total;
}

void Backend::launch(const std::string& name, std::int64_t /*num_threads*/, const std::vector<void*>& /*parameters*/,
                     Stream /*stream*/) {
  throw MachineError(name + " on " + this->name() + ": " + kernels_absent());
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

std::string why_failed(const Ticket& ticket) {
  if (ticket == nullptr || !ticket->passed()) return {};
  try {
    ticket->wait_passed();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace noria
