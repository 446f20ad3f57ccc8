#include "engine/issuer.h"

#include <utility>

namespace noria {

Issuer::Begun Issuer::begin(Op& op) {
  op.id = OpId(next_id_++);
  for (const Access& access : op.accesses) {
    const Buffer& buffer = buffers_[access.buffer];
    if (buffer.purpose == Purpose::working_copy || buffer.purpose == Purpose::held_gradient) {
      touched_.insert(buffer.unit);
    }
  }
  Begun begun{OpLabel{op.id, op.lane, op.verb, op.unit}, {}};
  for (const Wait& wait : hazards_.issue(op)) {
    kinds_.emplace(wait.giver, op.verb, wait.purpose, wait.rule);
    const auto found = tickets_.find(wait.on);
    if (found != tickets_.end()) begun.waits.push_back(found->second);  // absent: swept
  }
  return begun;
}

Ticket Issuer::submit(Op op, Transfer transfer) {
  auto begun = begin(op);
  Ticket ticket = backend_.submit(begun.label, std::move(transfer), std::move(begun.waits));
  keep(op.id, ticket);
  return ticket;
}

void Issuer::pass(Op op, Stream stream, const std::function<void()>& act) {
  auto begun = begin(op);
  const Ticket ticket = backend_.open(begun.label);
  keep(op.id, ticket);
  try {
    backend_.wait(begun.waits, stream, begun.label);
    if (act) act();
  } catch (...) {
    backend_.give_failed(ticket, std::current_exception());
    throw;
  }
  backend_.give(ticket, stream);
}

std::vector<Ticket> Issuer::before(const Access& access) const {
  std::vector<Ticket> tickets;
  for (OpId op : hazards_.before(access)) {
    const auto found = tickets_.find(op);
    if (found != tickets_.end()) tickets.push_back(found->second);  // absent: swept
  }
  return tickets;
}

std::vector<UnitId> Issuer::take_touched() {
  std::vector<UnitId> touched(touched_.begin(), touched_.end());
  touched_.clear();
  return touched;
}

void Issuer::poison(UnitId unit, Access leased, std::byte* memory, Bytes bytes) {
  if (!backend_.poisons()) return;
  Op op;
  op.lane = Lane::fetch;
  op.verb = Verb::poison;
  op.unit = unit;
  op.bytes = bytes;
  op.accesses = {leased};
  Transfer transfer;
  transfer.poison.emplace_back(memory, bytes);
  submit(std::move(op), std::move(transfer));
}

void Issuer::sweep(std::vector<OpLabel>& failed) {
  std::exception_ptr failure;
  for (auto it = tickets_.begin(); it != tickets_.end();) {
    if (!it->second->passed()) {
      ++it;
      continue;
    }
    try {
      it->second->wait_passed();
    } catch (...) {
      if (std::current_exception() != told_) failure = std::current_exception();
      failed.push_back(it->second->label);
    }
    it = tickets_.erase(it);
  }
  if (failure) std::rethrow_exception(failure);
}

std::vector<std::string> Issuer::wait_kinds() const {
  std::vector<std::string> names;
  for (const auto& [giver, waiter, purpose, rule] : kinds_)
    names.push_back(kind_of({OpId(), rule, giver, purpose}, waiter));
  return names;
}

Version Issuer::version(BufferId buffer) const {
  const auto index = static_cast<std::size_t>(buffer.value);
  return index < versions_.size() ? versions_[index] : 0;
}

Version Issuer::next_version(BufferId buffer) {
  const auto index = static_cast<std::size_t>(buffer.value);
  if (index >= versions_.size()) versions_.resize(index + 1, 0);
  return ++versions_[index];
}

}  // namespace noria
