#include "base/words.h"

#include <array>
#include <string>

#include "base/errors.h"

namespace noria {
namespace {

constexpr std::array<std::string_view, kNumLanes> kLanes{"compute", "fetch", "drain", "collect",     "peer",
                                                         "update",  "read",  "write", "read_weights"};
constexpr std::array<std::string_view, kNumVerbs> kVerbs{
    "forward", "backward", "user",  "fetch",       "drain",       "update",     "evict",       "poison",
    "load",    "draft",    "undo",  "sum",         "gather",      "reduce",     "save",        "offload",
    "reload",  "probe",    "stash", "fetch_state", "drain_state", "read_state", "write_state", "read_weights"};
constexpr std::array<std::string_view, 2> kPhases{"forward", "backward"};

template <std::size_t N>
std::size_t find(const std::array<std::string_view, N>& words, const char* what, std::string_view text) {
  for (std::size_t i = 0; i < N; ++i) {
    if (words[i] == text) return i;
  }
  std::string known;
  for (std::string_view word : words) known += (known.empty() ? "" : ", ") + std::string(word);
  throw UsageError(std::string("a ") + what, "\"" + std::string(text) + "\"", "use one of " + known);
}

}  // namespace

std::string_view to_string(Lane lane) { return kLanes.at(static_cast<std::size_t>(lane)); }
std::string_view to_string(Verb verb) { return kVerbs.at(static_cast<std::size_t>(verb)); }
std::string_view to_string(Phase phase) { return kPhases.at(static_cast<std::size_t>(phase)); }

Lane parse_lane(std::string_view text) { return static_cast<Lane>(find(kLanes, "lane", text)); }
Verb parse_verb(std::string_view text) { return static_cast<Verb>(find(kVerbs, "verb", text)); }
Phase parse_phase(std::string_view text) { return static_cast<Phase>(find(kPhases, "phase", text)); }

}  // namespace noria
