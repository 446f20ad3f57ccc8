#include "plan/matching.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "base/errors.h"

namespace noria {
namespace {

using Counts = std::vector<std::int64_t>;  // of granules, by rank

std::int64_t sum(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), std::int64_t{0}); }

/// Divides `total` so that the remaining lack is as even as possible. Returns what each rank gets.
Counts even_out(const Counts& needed, std::int64_t total) {
  std::int64_t low = 0, high = *std::max_element(needed.begin(), needed.end());
  const auto above = [&](std::int64_t level) {
    std::int64_t count = 0;
    for (std::int64_t need : needed) count += std::max<std::int64_t>(need - level, 0);
    return count;
  };
  while (low < high) {  // finds the lowest level that `total` can bring every lack down to
    const std::int64_t level = (low + high) / 2;
    if (above(level) <= total) high = level;
    else low = level + 1;
  }
  Counts given;
  for (std::int64_t need : needed) given.push_back(std::max<std::int64_t>(need - low, 0));
  std::int64_t left = total - sum(given);  // too little to bring all of them down by one more granule
  for (std::size_t i = 0; i < needed.size() && left > 0; ++i) {
    if (given[i] == needed[i] || needed[i] < low) continue;
    ++given[i];
    --left;
  }
  return given;
}

/// Returns `amounts` without those of ranks that no link connects to a rank with something in `others`.
Counts reached(Counts amounts, const Counts& others, const auto& has_link) {
  for (std::size_t own = 0; own < amounts.size(); ++own) {
    bool is_reached = false;
    for (std::size_t other = 0; other < others.size(); ++other) is_reached |= others[other] > 0 && has_link(own, other);
    if (!is_reached) amounts[own] = 0;
  }
  return amounts;
}

class Market {
 public:
  Market(Counts wanted, Counts spare, const std::vector<std::vector<double>>& bandwidth)
      : wanted_(std::move(wanted)),
        spare_(std::move(spare)),
        bandwidth_(bandwidth) {}

  /// Deals until no rank wants memory that a linked lender still has.
  void deal_all() {
    while (deal()) {
    }
  }
  const std::map<std::pair<int, int>, std::int64_t>& given() const { return given_; }  // by lender and borrower

 private:
  bool deal() {
    std::map<int, Counts> claims;  // by lender
    for (std::size_t i = 0; i < wanted_.size(); ++i) claim(static_cast<int>(i), claims);
    bool is_any = false;
    for (auto& [lender, by] : claims) is_any |= grant(lender, by);
    return is_any;
  }

  void claim(int borrower, std::map<int, Counts>& claims) {
    const auto b = static_cast<std::size_t>(borrower);
    double all = 0;
    int best = -1;
    for (std::size_t l = 0; l < spare_.size(); ++l) {
      if (spare_[l] == 0 || bandwidth_[l][b] <= 0) continue;
      all += bandwidth_[l][b];
      if (best < 0 || bandwidth_[l][b] > bandwidth_[static_cast<std::size_t>(best)][b]) best = static_cast<int>(l);
    }
    if (wanted_[b] == 0 || best < 0) return;
    std::int64_t left = wanted_[b];
    for (std::size_t l = 0; l < spare_.size(); ++l) {
      if (spare_[l] == 0 || bandwidth_[l][b] <= 0) continue;
      const auto share = static_cast<std::int64_t>(static_cast<double>(wanted_[b]) * bandwidth_[l][b] / all);
      of(claims, static_cast<int>(l))[b] += std::min(share, left);
      left -= std::min(share, left);
    }
    of(claims, best)[b] += left;
  }

  Counts& of(std::map<int, Counts>& claims, int lender) {
    return claims.try_emplace(lender, Counts(wanted_.size(), 0)).first->second;
  }

  bool grant(int lender, const Counts& claims) {
    std::int64_t& spare = spare_[static_cast<std::size_t>(lender)];
    const std::int64_t all = sum(claims), had = spare;
    for (std::size_t b = 0; b < claims.size(); ++b) {
      if (claims[b] == 0) continue;
      // Rounded up, so that every round gives something away. The last borrower gets what is left.
      const std::int64_t share = all <= had ? claims[b] : (claims[b] * had + all - 1) / all;
      const std::int64_t given = std::min(share, spare);
      spare -= given;
      wanted_[b] -= given;
      if (given > 0) given_[{lender, static_cast<int>(b)}] += given;
    }
    return spare < had;
  }

  Counts wanted_, spare_;
  const std::vector<std::vector<double>>& bandwidth_;
  std::map<std::pair<int, int>, std::int64_t> given_;
};

/// Divides `spare` among the ranks of `machine` by what they want. Returns granules, by lender and borrower. No rank
/// lends to itself.
std::map<std::pair<int, int>, std::int64_t> wanted_of(const std::vector<MemoryOffer>& offers,
                                                      const std::string& machine, const Counts& spare,
                                                      std::vector<std::vector<double>> bandwidth) {
  Counts wanted(offers.size(), 0);
  for (std::size_t i = 0; i < offers.size(); ++i) {
    bandwidth[i][i] = 0;
    if (offers[i].machine == machine) {
      wanted[i] = (offers[i].wanted.count + kLoanGranule.count - 1) / kLoanGranule.count;
    }
  }
  Market market(wanted, spare, bandwidth);
  market.deal_all();
  return market.given();
}

}  // namespace

std::vector<MemoryLoan> match(const std::vector<MemoryOffer>& offers,
                              const std::vector<std::vector<double>>& bandwidth) {
  NORIA_INVARIANT(bandwidth.size() == offers.size(), "a row of bandwidths for each lender");
  std::vector<MemoryLoan> loans;
  std::set<std::string> machines;
  for (const MemoryOffer& offer : offers) machines.insert(offer.machine);
  for (const std::string& machine : machines) {
    Counts needed(offers.size(), 0), spare(offers.size(), 0);
    for (std::size_t i = 0; i < offers.size(); ++i) {
      if (offers[i].machine != machine) continue;
      needed[i] = (offers[i].needed.count + kLoanGranule.count - 1) / kLoanGranule.count;
      if (needed[i] == 0) spare[i] = offers[i].spare.count / kLoanGranule.count;
    }
    const auto lends = [&](std::size_t lender, std::size_t borrower) { return bandwidth[lender][borrower] > 0; };
    const auto borrows = [&](std::size_t borrower, std::size_t lender) { return lends(lender, borrower); };
    std::map<std::pair<int, int>, std::int64_t> given;
    while (true) {  // repeats if a rank's share counted memory that no link leads to
      const Counts wanted = reached(needed, spare, borrows), had = reached(spare, needed, lends);
      Market market(even_out(wanted, std::min(sum(wanted), sum(had))), had, bandwidth);
      market.deal_all();
      if (market.given().empty()) break;
      for (const auto& [pair, count] : market.given()) {
        given[pair] += count;
        spare[static_cast<std::size_t>(pair.first)] -= count;
        needed[static_cast<std::size_t>(pair.second)] -= count;
      }
    }
    const auto also = wanted_of(offers, machine, spare, bandwidth);
    for (const auto& [pair, count] : also) given[pair] += count;
    std::map<int, Bytes> ends;
    for (const auto& [pair, count] : given) {
      const Bytes bytes = kLoanGranule * count;
      const auto wanted = also.find(pair);
      loans.push_back({pair.first, pair.second, ends[pair.first], bytes,
                       wanted == also.end() ? Bytes{0} : kLoanGranule * wanted->second});
      ends[pair.first] += bytes;
    }
  }
  std::sort(loans.begin(), loans.end());
  return loans;
}

std::vector<std::vector<double>> link_classes(std::vector<std::vector<double>> bandwidth) {
  for (std::size_t borrower = 0; borrower < bandwidth.size(); ++borrower) {
    double fastest = 0;
    for (const auto& row : bandwidth) fastest = std::max(fastest, row[borrower]);
    for (auto& row : bandwidth) {
      if (row[borrower] > 0) row[borrower] = std::exp2(std::round(std::log2(row[borrower] / fastest)));
    }
  }
  return bandwidth;
}

}  // namespace noria
