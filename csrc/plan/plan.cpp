#include "plan/plan.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace noria {
namespace {

constexpr std::array<std::string_view, 15> kPurposes{
    "weights",         "gradient_buffer",    "working_copy", "held_gradient", "optimizer_state", "gradient_sum",
    "gradient_scales", "unreduced_gradient", "saved_tensor", "saved_copy",    "peer_copy",       "update_slot",
    "record",          "state_slot",         "weights_slot"};
constexpr std::array<std::string_view, 4> kPlaces{"device", "host", "peer", "file"};

std::string name_of(UnitId unit, const std::vector<std::string>& unit_names) {
  const auto index = static_cast<std::size_t>(unit.value);
  if (!unit.valid()) return "-";
  return index < unit_names.size() ? unit_names[index] : "unit " + std::to_string(unit.value);
}

std::string padded(std::string text, std::size_t width) {
  text.resize(std::max(text.size(), width), ' ');
  return text;
}

// Shows the range of a lease, because leases move from plan to plan. Buffers of the home stay, so their name is enough.
std::string text_of(const Access& access, const BufferTable& buffers, const std::vector<std::string>& unit_names) {
  const Buffer& buffer = buffers[access.buffer];
  std::string text = std::string(to_string(buffer.purpose)) + "(" + name_of(buffer.unit, unit_names) + ")";
  if (buffer.place.kind == Place::Kind::device) {
    text +=
        "[" + std::to_string(buffer.offset.count) + ", " + std::to_string((buffer.offset + buffer.bytes).count) + ")";
  }
  return text + "@" + std::to_string(access.version);
}

}  // namespace

std::string_view to_string(Purpose purpose) { return kPurposes.at(static_cast<std::size_t>(purpose)); }

std::string to_string(const Place& place) {
  const std::string kind(kPlaces.at(static_cast<std::size_t>(place.kind)));
  return place == Place{Place::Kind::host, 0} ? kind : kind + ":" + std::to_string(place.index);
}

BufferId BufferTable::intern(const Buffer& buffer) {
  const auto [found, is_new] = ids_.try_emplace(buffer, BufferId(static_cast<std::int32_t>(buffers_.size())));
  if (is_new) buffers_.push_back(buffer);
  return found->second;
}

std::string to_text(const PassPlan& plan, const BufferTable& buffers, const std::vector<std::string>& unit_names) {
  std::size_t width = 1;
  for (const Op& op : plan.ops) width = std::max(width, name_of(op.unit, unit_names).size());
  std::string text = "pass of " + std::to_string(plan.visits.size()) + " visits: " + std::to_string(plan.num_fetches) +
                     " fetches of " + to_string(plan.fetched) + ", peak " + to_string(plan.peak) + ", at most " +
                     std::to_string(plan.peak_units) + " units leased\n";
  for (const Op& op : plan.ops) {
    std::array<char, 16> visit{};
    std::snprintf(visit.data(), visit.size(), "%4d  ", op.visit);
    text +=
        visit.data() + padded(std::string(to_string(op.verb)), 8) + "  " + padded(name_of(op.unit, unit_names), width);
    for (const Access::Mode mode : {Access::Mode::read, Access::Mode::write}) {
      std::string list;
      for (const Access& access : op.accesses) {
        if (access.mode == mode) list += (list.empty() ? "" : ", ") + text_of(access, buffers, unit_names);
      }
      const char* word = op.verb == Verb::evict ? "  ends " : mode == Access::Mode::read ? "  reads " : "  writes ";
      if (!list.empty()) text += word + list;
    }
    text += "\n";
  }
  text += "stays:";
  for (const Resident& resident : plan.exit) {
    text += " " + name_of(resident.unit, unit_names) + "[" + std::to_string(resident.offset.count) + "]";
  }
  return text + (plan.exit.empty() ? " nothing\n" : "\n");
}

void note_last_visits(const std::vector<Visit>* visits, std::vector<UnitId> Visit::* units,
                      UnitMap<std::int64_t>& last) {
  last.fill(-1);
  if (visits == nullptr) return;
  std::int64_t index = 0;
  for (const Visit& visit : *visits) {
    for (UnitId unit : visit.*units) last[unit] = index;
    ++index;
  }
}

}  // namespace noria
