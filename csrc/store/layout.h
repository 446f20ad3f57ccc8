// Where every tensor of a unit, and every array of the home, lies: offsets as pure functions of sizes.
//
// Units: bytes. Order: the order of the request is the order in memory. Nothing is owned and nothing is taken here, so
// what a plan promises and what an arena takes come from the same numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/ids.h"

namespace noria {

/// A tensor as memory sees it. `storage_elements` are what it spans in storage order: `num_elements` when it is dense
/// in any order of its dimensions, more when its strides leave holes.
struct TensorSpec {
  std::int64_t num_elements = 0;
  std::int64_t item_bytes = 0;
  std::int64_t storage_elements = 0;
};

struct TensorSlot {
  Bytes offset;  // a multiple of kTensorAlignment
  Bytes bytes;   // the tensor's own, without padding
};

/// One unit in one format: a slot per tensor, and a total that is a multiple of kTensorAlignment, so that units laid
/// behind each other stay aligned.
struct UnitLayout {
  std::vector<TensorSlot> slots;
  Bytes total;
};

UnitLayout lay_out_unit(const std::vector<TensorSpec>& tensors);

/// One array of one unit in the home: its working copy, held gradients, a moment.
struct HomeArray {
  UnitId unit;
  std::string purpose;  // as the ledger calls it
  Bytes bytes;
};

struct HomeSlot {
  UnitId unit;
  std::string purpose;
  Bytes offset;  // a multiple of kTensorAlignment
  Bytes bytes;
};

struct LedgerRow {
  std::string purpose;
  Bytes bytes;  // padding included: the rows of a home add up to its total
};

struct HomeLayout {
  std::vector<HomeSlot> slots;    // one per array, in the order asked for
  std::vector<LedgerRow> ledger;  // one per purpose, in the order of first use
  Bytes total;
};

/// Arrays one behind the other in one arena.
HomeLayout lay_out_home(const std::vector<HomeArray>& arrays);

}  // namespace noria
