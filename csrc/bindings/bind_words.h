// What the files that bind share: calls without the GIL, and addresses, which Python knows as integers.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

namespace noria {

using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

/// Asks without the GIL, for a result that becomes a Python object.
template <class Question>
auto without_gil(Question question) {
  const pybind11::gil_scoped_release no_gil;
  return question();
}

using Address = std::uintptr_t;

template <class Element = std::byte>
Element* pointer(Address address) {
  return reinterpret_cast<Element*>(address);
}

inline Address address_of(const void* memory) { return reinterpret_cast<Address>(memory); }

}  // namespace noria
