// Gives ops their place in issue order, finds the tickets that each must wait for, and queues transfers.
//
// Ownership: borrows the backend and the table of buffers. The only caller of `Hazards` at run time: every op of the
// engine passes through `begin`, so no wait can be forgotten or written by hand. Versions: `write` raises the version
// of a home buffer; a read asks for the newest. Threads: the caller serialises.
#pragma once

#include <exception>
#include <functional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "device/backend.h"
#include "plan/hazards.h"
#include "plan/plan.h"

namespace noria {

class Issuer {
 public:
  Issuer(Backend& backend, BufferTable& buffers) : backend_(backend), buffers_(buffers), hazards_(buffers) {}

  struct Begun {
    OpLabel label;
    std::vector<Ticket> waits;
  };
  /// Names `op` (sets its id) and derives its waits. Follow with `keep`, unless the op gives no ticket.
  Begun begin(Op& op);
  void keep(OpId id, Ticket ticket) { tickets_[id] = std::move(ticket); }
  /// Both, for an op that is a transfer.
  Ticket submit(Op op, Transfer transfer);
  /// Both, for an op of the compute lane that is over as soon as the stream has come so far, and `act`, called once the
  /// stream waits for what the op waits for, has queued there what the op does.
  void pass(Op op, Stream stream, const std::function<void()>& act = {});
  /// `leased`, whose lease ends here, is overwritten as soon as nobody reads it; nothing, on a machine that does not.
  void poison(UnitId unit, Access leased, std::byte* memory, Bytes bytes);

  /// What an access would wait for if it were made now.
  std::vector<Ticket> before(const Access& access) const;
  /// Units whose working copy or held gradient an op has named since the last call.
  std::vector<UnitId> take_touched();

  /// Forgets tickets that have passed. A failure found on the way is thrown, once.
  void sweep();

  Version version(BufferId buffer) const;
  /// The version after one more write.
  Version next_version(BufferId buffer);
  void set_version(BufferId buffer, Version version);

  /// What the next op will be named.
  OpId next_op() const { return OpId(next_id_); }

  BufferTable& buffers() { return buffers_; }
  Hazards& hazards() { return hazards_; }
  std::size_t num_remembered() const { return hazards_.num_remembered() + tickets_.size(); }
  /// Every kind of wait that was ever derived, as `kind_of` names it: what the tests of waits must cover.
  std::vector<std::string> wait_kinds() const;

 private:
  Backend& backend_;
  BufferTable& buffers_;
  Hazards hazards_;
  std::int64_t next_id_ = 0;
  std::unordered_map<OpId, Ticket> tickets_;
  std::vector<Version> versions_;  // by buffer
  std::set<UnitId> touched_;
  std::set<std::tuple<Verb, Verb, Purpose, Rule>> kinds_;  // giver, waiter; finitely many
};

}  // namespace noria
