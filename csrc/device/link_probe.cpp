#include "device/link_probe.h"

#include <algorithm>

#include "device/timing.h"

namespace noria {
namespace {

constexpr std::int64_t kRoundNs = 1'000'000;
constexpr Bytes kLeast{64 << 10};         // of the first copies
constexpr std::int64_t kMostCopies = 64;  // of a round, each way
constexpr int kRounds = 3;

std::int64_t round_ns(Backend& backend, const Transfer& out, const Transfer& back) {
  const OpLabel label{OpId(), Lane::peer, Verb::probe, UnitId()};
  const std::int64_t begin_ns = now_ns();
  wait_for_all({backend.submit(label, out, {}), backend.submit(label, back, {})});
  return std::max<std::int64_t>(now_ns() - begin_ns, 1);
}

double gib_s_of(Bytes bytes, std::int64_t ns) {
  return static_cast<double>(bytes.count) / 1073741824.0 / (static_cast<double>(ns) * 1e-9);
}

}  // namespace

double measure_link_gib_s(Backend& backend, std::byte* own, std::byte* peers, Bytes bytes, int link) {
  Transfer out, back;
  const auto set_bytes = [&](Bytes each) {
    out.copies = {{peers, own, each, link}};
    back.copies = {{own, peers, each, link}};
  };
  set_bytes(std::min(bytes, kLeast));
  if (const std::int64_t ns = round_ns(backend, out, back); ns > kRoundNs) {
    const std::int64_t again_ns = round_ns(backend, out, back);  // the first may include start-up
    if (again_ns > kRoundNs) return gib_s_of(out.bytes() + back.bytes(), std::min(ns, again_ns));
  }
  set_bytes(bytes);
  const std::int64_t once_ns = round_ns(backend, out, back);
  const auto count = static_cast<std::size_t>(std::clamp<std::int64_t>(kRoundNs / once_ns, 1, kMostCopies));
  out.copies.resize(count, out.copies.front());
  back.copies.resize(count, back.copies.front());
  std::int64_t least_ns = round_ns(backend, out, back);
  for (int round = 1; round < kRounds; ++round) least_ns = std::min(least_ns, round_ns(backend, out, back));
  return gib_s_of(out.bytes() + back.bytes(), least_ns);
}

}  // namespace noria
