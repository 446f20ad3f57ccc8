// Makes a number from bytes that shows whether they have changed.
//
// Two different ranges have the same sum by chance, about once in 2^64 times. It protects against faults, not against
// people who want to deceive.
//
// Order: none. Threads: any; nothing here keeps state.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.h"

namespace noria {

/// One core reads about 11 GiB/s (measured on an AMD EPYC beside other load).
std::uint64_t checksum(const std::byte* memory, Bytes bytes);

}  // namespace noria
