// Issuer gives ops their place in issue order, finds the tickets that each must wait for, and queues transfers.
//
// Ownership: borrows the backend and the table of buffers.
// Order: every op of the engine passes through `begin`, and only the issuer asks `Hazards`. So no wait between ops on
// the same data is forgotten or written by hand.
// Versions: `next_version` counts one more write of a buffer; a read asks for the newest version.
// Threads: the caller serialises. `pass` may block.
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
  /// `assists`: of the collect lane, if there is one.
  Issuer(Backend& backend, BufferTable& buffers, bool assists)
      : backend_(backend),
        buffers_(buffers),
        hazards_(buffers, assists) {}

  struct Begun {
    OpLabel label;
    std::vector<Ticket> waits;
  };
  /// Names `op` (sets its id) and derives its waits. Call `keep` next, unless the op gives no ticket.
  Begun begin(Op& op);
  void keep(OpId id, Ticket ticket) { tickets_[id] = std::move(ticket); }
  /// Begins, queues and keeps an op that is a transfer.
  Ticket submit(Op op, Transfer transfer);
  /// Begins and keeps an op of the compute lane that is over as soon as the stream has come so far. First makes the
  /// stream wait for what the op waits for. Then calls `act`, which queues on the stream what the op does.
  void pass(Op op, Stream stream, const std::function<void()>& act = {});
  /// Overwrites `leased`, whose lease ends here, as soon as no op reads it any more. Does nothing if the backend does
  /// not poison.
  void poison(UnitId unit, Access leased, std::byte* memory, Bytes bytes);

  /// Returns the tickets of all ops that conflict with this access, also those that a wait would imply.
  std::vector<Ticket> before(const Access& access) const;
  /// Returns the units whose working copy or held gradient an op has named since the last call.
  std::vector<UnitId> take_touched();

  /// Forgets tickets that have passed or failed. Throws one of the failures found on the way; later ops do not hear of
  /// any. `failed` gets the labels of all that have failed.
  void sweep(std::vector<OpLabel>& failed);
  /// The caller of the engine hears of this failure now. `sweep` does not throw it again.
  void note_told(std::exception_ptr failure) { told_ = std::move(failure); }

  Version version(BufferId buffer) const;
  /// Raises the version by one write and returns it.
  Version next_version(BufferId buffer);

  /// Returns the id that the next op will get.
  OpId next_op() const { return OpId(next_id_); }

  BufferTable& buffers() { return buffers_; }
  Hazards& hazards() { return hazards_; }
  std::size_t num_remembered() const { return hazards_.num_remembered() + tickets_.size(); }
  /// Returns every kind of wait that was ever derived, as `kind_of` names it. The tests of waits must cover all of
  /// them.
  std::vector<std::string> wait_kinds() const;

 private:
  Backend& backend_;
  BufferTable& buffers_;
  Hazards hazards_;
  std::int64_t next_id_ = 0;
  std::unordered_map<OpId, Ticket> tickets_;
  std::vector<Version> versions_;  // by buffer
  std::set<UnitId> touched_;
  std::exception_ptr told_;
  std::set<std::tuple<Verb, Verb, Purpose, Rule>> kinds_;  // giver, waiter; finitely many
};

}  // namespace noria
