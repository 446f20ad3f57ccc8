#include "comm/agreement.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace noria {
namespace {

constexpr std::size_t kWords = 5;  // of an intent

std::string describe_version(std::int64_t version) {
  if (version == 0) return "as wrap left it";
  if (version < 0) return "as it was loaded after step " + std::to_string(-1 - version);
  return "as step " + std::to_string(version) + " left it";
}

}  // namespace

Agreement::Agreement(std::shared_ptr<Collectives> collectives, std::size_t most, std::vector<std::string> names,
                     std::string remedy)
    : collectives_(std::move(collectives)),
      most_(most),
      names_(std::move(names)),
      remedy_(std::move(remedy)) {}

std::vector<std::vector<Intent>> Agreement::tell(const std::vector<Intent>& own) {
  std::vector<std::int64_t> words{static_cast<std::int64_t>(own.size())};
  for (const Intent& each : own) {
    words.insert(words.end(), {static_cast<std::int64_t>(each.act), static_cast<std::int64_t>(each.phase), each.subject,
                               each.version, each.num_broken});
  }
  const std::size_t row = 1 + kWords * most_;
  words.resize(row, 0);  // all ranks give the same count
  const std::vector<std::int64_t> told = collectives_->exchange(words);
  std::size_t least = most_;
  for (std::size_t begin = 0; begin < told.size(); begin += row) {
    least = std::min(least, static_cast<std::size_t>(told[begin]));
  }
  std::vector<std::vector<Intent>> all(least);
  for (std::size_t begin = 0; begin < told.size(); begin += row) {
    const std::int64_t* word = &told[begin + 1];
    for (std::size_t i = 0; i < least; ++i, word += kWords) {
      all[i].push_back({static_cast<Intent::Act>(word[0]), static_cast<Phase>(word[1]), word[2], word[3], word[4]});
    }
  }
  return all;
}

void Agreement::refuse_other_broken(const std::vector<Intent>& all) {
  for (std::size_t other = 0; other < all.size(); ++other) {
    if (all[other].num_broken == all[0].num_broken) continue;
    throw UsageError("a backward that raises on all ranks or on none",
                     std::to_string(all[other].num_broken) + " since wrap that have raised on rank " +
                         std::to_string(other) + ", and " + std::to_string(all[0].num_broken) + " on rank 0",
                     "start again from a checkpoint, on all ranks; skip a batch before its backward, on any of them");
  }
}

void Agreement::refuse_other_ops(const std::vector<Intent>& all) const {
  for (std::size_t other = 0; other < all.size(); ++other) {
    if (!all[other].is_same_op(all[0]) || all[other].version != all[0].version) refuse(all, 0, other);
  }
}

void Agreement::refuse(const std::vector<Intent>& all, std::size_t first, std::size_t other) const {
  const auto [low, high] = std::minmax(first, other);
  const bool are_alike = describe(all[low]) == describe(all[high]);
  const auto count = [&](const Intent& intent) {
    return are_alike ? ", and to exchange " + std::to_string(intent.subject) + " numbers" : "";
  };
  throw UsageError("ranks that do the same",
                   "rank " + std::to_string(low) + " about to " + describe(all[low]) + count(all[low]) + " and rank " +
                       std::to_string(high) + " to " + describe(all[high]) + count(all[high]),
                   remedy_);
}

void Agreement::refuse_version(const std::vector<Intent>& all, std::size_t first, std::size_t other,
                               std::int64_t version) const {
  throw UsageError("ranks that step together",
                   "rank " + std::to_string(first) + " about to " + describe(all[first]) + ", which rank " +
                       std::to_string(other) + " has " + describe_version(version),
                   remedy_);
}

std::string Agreement::describe(const Intent& intent) const {
  if (intent.act == Intent::Act::exchange) {
    const bool ends_backward = static_cast<SyncPoint>(intent.version) == SyncPoint::backward;
    return ends_backward ? "end a backward"
                         : "do what all ranks do together (state_dict(), a save, a load, a norm, noria.materialize, "
                           "noria.unwrap, the first no_sync(), training of more parameters)";
  }
  const std::string verb = intent.act == Intent::Act::gather ? "gather" : "reduce";
  return verb + " \"" + names_.at(static_cast<std::size_t>(intent.subject)) + "\" " + describe_version(intent.version);
}

}  // namespace noria
