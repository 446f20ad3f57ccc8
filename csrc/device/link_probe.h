// Measures how fast a link to a peer's memory is, with copies there and back on the otherwise empty peer lane.
//
// Units: bytes, GiB/s.
// Order: the caller has nothing under way on the peer lane, nor anything else that uses `own`.
// Threads: the calling thread waits.
#pragma once

#include "base/bytes.h"
#include "device/backend.h"

namespace noria {

/// Returns the GiB/s of the fastest of a few rounds: 1 to 64 copies each way, about a millisecond. Before them a small
/// copy each way touches pages and makes streams. If it and a second one both take longer than a millisecond, the
/// faster of them counts.
///
/// `own` and `peers` both have `bytes` bytes and are overwritten; `peers` is opened memory. Throws the error of a copy
/// that fails.
double measure_link_gib_s(Backend& backend, std::byte* own, std::byte* peers, Bytes bytes, int link);

}  // namespace noria
