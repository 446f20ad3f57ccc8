#include "bindings/rank_audit.h"

#include <string>
#include <utility>

#include "base/errors.h"

namespace noria {

void RankAudit::note_step(const std::vector<int>& updated, std::uint32_t hyperparameters) {
  for (int index : updated) {
    std::uint64_t mixed = (static_cast<std::uint64_t>(index) + 1) * 0x9e3779b97f4a7c15;
    mixed = (mixed ^ (mixed >> 32)) * 0xbf58476d1ce4e5b9;
    updated_ += mixed ^ (mixed >> 29);
  }
  hyperparameters_ += hyperparameters;
}

void RankAudit::note_sums() {
  adds_to_ = ParameterSet(static_cast<std::size_t>(parts_.parameters.size()));
  for (int index = 0; index < parts_.parameters.size(); ++index) {
    const auto& [facts, unit, sizes, strides] = parts_.parameters[index];
    if (!facts.may_have_gradient()) continue;
    if (parts_.engine.is_reduced(unit, facts.gradient_begin(), facts.bytes())) {
      adds_to_.add(static_cast<std::size_t>(index));
    }
  }
}

ParameterSet RankAudit::share_arrivals(ParameterSet arrived) {
  const auto num_words = static_cast<std::ptrdiff_t>(arrived.words().size());
  std::vector<std::int64_t> own = arrived.words();
  own.insert(own.end(), adds_to_.words().begin(), adds_to_.words().end());
  const std::vector<std::int64_t> own_steps = steps();
  own.insert(own.end(), own_steps.begin(), own_steps.end());
  const auto row = static_cast<std::ptrdiff_t>(own.size());
  const std::vector<std::int64_t> all = parts_.engine.exchange(std::move(own), SyncPoint::backward);
  std::vector<std::int64_t> first;
  for (auto its = all.begin(); its != all.end(); its += row) {
    arrived.add_all({its, its + num_words});
    const std::vector<std::int64_t> done(its + num_words, its + row);
    if (its == all.begin()) first = done;
    const auto rank = static_cast<std::size_t>((its - all.begin()) / row);
    const auto steps_of = [&](const std::vector<std::int64_t>& of) { return std::vector(of.end() - 2, of.end()); };
    refuse_other_steps(steps_of(first), steps_of(done), rank);
    if (done != first) refuse_other_reductions(first, done, rank);
  }
  return arrived;
}

std::vector<std::int64_t> RankAudit::steps() const {
  return {static_cast<std::int64_t>(updated_), static_cast<std::int64_t>(hyperparameters_)};
}

std::vector<std::int64_t> RankAudit::exchange(std::vector<std::int64_t> numbers) {
  const std::vector<std::int64_t> own = steps();
  numbers.insert(numbers.end(), own.begin(), own.end());
  const auto row = static_cast<std::ptrdiff_t>(numbers.size());
  const std::vector<std::int64_t> all = parts_.engine.exchange(std::move(numbers), SyncPoint::other);
  std::vector<std::int64_t> gathered, first;
  for (auto its = all.begin(); its != all.end(); its += row) {
    const auto end = its + row - static_cast<std::ptrdiff_t>(own.size());
    gathered.insert(gathered.end(), its, end);
    const std::vector<std::int64_t> steps_of(end, its + row);
    if (its == all.begin()) first = steps_of;
    refuse_other_steps(first, steps_of, static_cast<std::size_t>((its - all.begin()) / row));
  }
  return gathered;
}

void RankAudit::refuse_other_steps(const std::vector<std::int64_t>& first, const std::vector<std::int64_t>& its,
                                   std::size_t rank) {
  const std::string there = "on rank " + std::to_string(rank);
  const std::string start_again = "; these processes have parted: start again from a checkpoint of before";
  if (its[0] != first[0]) {
    throw UsageError("ranks that step as often, each time with gradients of the same parameters",
                     "steps since wrap that have updated other parameters on rank 0 than " + there,
                     "let all ranks call step() and zero_grad() alike, for the same parameters" + start_again);
  }
  if (its[1] != first[1]) {
    throw UsageError("the same hyperparameters on all ranks", "steps since wrap with others on rank 0 than " + there,
                     "give schedulers what all ranks have alike: a loss that is averaged over them" + start_again);
  }
}

void RankAudit::refuse_other_reductions(const std::vector<std::int64_t>& first, const std::vector<std::int64_t>& its,
                                        std::size_t rank) const {
  const std::string there = "on rank " + std::to_string(rank);
  const auto num_parameters = static_cast<std::size_t>(parts_.parameters.size());
  ParameterSet on_first(num_parameters), on_its(num_parameters);
  on_first.add_all({first.begin(), first.end() - 2});
  on_its.add_all({its.begin(), its.end() - 2});
  std::size_t index = 0;
  while (on_first.contains(index) == on_its.contains(index)) ++index;
  throw UsageError("p.grad cleared on all ranks or on none",
                   "a backward that adds to the gradient of \"" +
                       parts_.parameters[static_cast<int>(index)].facts.name + "\" " +
                       (on_first.contains(index) ? "on rank 0 and not " + there : there + " and not on rank 0"),
                   "let all ranks call zero_grad() alike");
}

}  // namespace noria
