// Measures how fast a link to a peer's memory is, with copies there and back on the otherwise empty peer lane.
//
// Units: bytes, GiB/s.
// Order: the caller has nothing under way on the peer lane, nor anything else that uses `own`.
// Threads: the calling thread waits.
#pragma once

#include "base/bytes.h"
#include "device/backend.h"

namespace noria {

/// Returns the GiB/s of the fastest of a few rounds of about a millisecond each, both ways. The first copies do not
/// count, because they touch pages and make streams. If even they take longer than a round, the faster of two
/// counts.
///
/// `own` and `peers` both have `bytes` bytes and are overwritten; `peers` is opened memory. Throws the error of a copy
/// that fails.
double measure_link_gib_s(Backend& backend, std::byte* own, std::byte* peers, Bytes bytes, int link);

}  // namespace noria
