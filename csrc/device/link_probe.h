// How fast a link to a peer's memory is: copies there and back on the peer lane, with nothing else on it.
//
// Units: bytes, GiB/s. Order: the caller has nothing under way on the peer lane, nor anything else on `own`. Threads:
// the calling thread waits.
#pragma once

#include "base/bytes.h"
#include "device/backend.h"

namespace noria {

/// GiB/s of the faster of a few rounds of about a millisecond each, both ways; the first ones, which touch pages and
/// make streams, do not count. `own` and `peers` are both of `bytes`, and written; `peers` is opened memory. Throws
/// what a copy fails with.
double measure_link_gib_s(Backend& backend, std::byte* own, std::byte* peers, Bytes bytes, int link);

}  // namespace noria
