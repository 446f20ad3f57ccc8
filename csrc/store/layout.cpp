#include "store/layout.h"

#include <algorithm>

#include "base/errors.h"

namespace noria {

UnitLayout lay_out_unit(const std::vector<TensorSpec>& tensors) {
  UnitLayout layout;
  layout.slots.reserve(tensors.size());
  for (const TensorSpec& tensor : tensors) {
    NORIA_INVARIANT(tensor.num_elements >= 0 && tensor.item_bytes > 0, "a tensor has no size");
    NORIA_INVARIANT(tensor.storage_elements >= tensor.num_elements,
                    "a tensor of " + std::to_string(tensor.num_elements) + " elements shares some of them: it spans " +
                        std::to_string(tensor.storage_elements));
    const Bytes bytes{tensor.storage_elements * tensor.item_bytes};
    layout.slots.push_back({layout.total, bytes});
    layout.total = align_up(layout.total + bytes, kTensorAlignment);
  }
  return layout;
}

HomeLayout lay_out_home(const std::vector<HomeArray>& arrays) {
  HomeLayout layout;
  layout.slots.reserve(arrays.size());
  for (const HomeArray& array : arrays) {
    NORIA_INVARIANT(array.bytes >= Bytes{0}, "an array of the home has no size");
    const Bytes padded = align_up(array.bytes, kTensorAlignment);
    layout.slots.push_back({array.unit, array.purpose, layout.total, array.bytes});
    layout.total += padded;
    const auto row = std::find_if(layout.ledger.begin(), layout.ledger.end(),
                                  [&](const LedgerRow& candidate) { return candidate.purpose == array.purpose; });
    if (row == layout.ledger.end()) {
      layout.ledger.push_back({array.purpose, padded});
    } else {
      row->bytes += padded;
    }
  }
  return layout;
}

}  // namespace noria
