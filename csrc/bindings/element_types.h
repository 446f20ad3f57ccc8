// Names the element types that ranks sum, in one table: for collectives, torch and Python.
#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "base/errors.h"
#include "comm/collectives.h"

namespace noria {

struct ElementNames {
  ElementType type;
  c10::ScalarType torchs;
  std::string_view text;
};

inline constexpr std::array<ElementNames, 4> kElements{{{ElementType::fp32, c10::ScalarType::Float, "fp32"},
                                                        {ElementType::fp64, c10::ScalarType::Double, "fp64"},
                                                        {ElementType::fp16, c10::ScalarType::Half, "fp16"},
                                                        {ElementType::bf16, c10::ScalarType::BFloat16, "bf16"}}};

template <class Name>
ElementNames element_names(Name ElementNames::* column, Name wanted, const std::string& said) {
  const auto found = std::find_if(kElements.begin(), kElements.end(),
                                  [&](const ElementNames& each) { return each.*column == wanted; });
  if (found == kElements.end()) throw UsageError("one of fp32, fp64, fp16, bf16", said, "use a floating dtype");
  return *found;
}

inline c10::ScalarType scalar_type(ElementType type) {
  return element_names(&ElementNames::type, type, "another").torchs;
}
inline ElementType element_type(c10::ScalarType type) {
  return element_names(&ElementNames::torchs, type, c10::toString(type)).type;
}
inline ElementType element_type(const std::string& text) {
  return element_names<std::string_view>(&ElementNames::text, text, "\"" + text + "\"").type;
}

}  // namespace noria
