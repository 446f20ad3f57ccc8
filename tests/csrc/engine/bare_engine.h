// The engine without torch: a model of plain arrays, whose layers mix bits, driven by the verbs that hooks would call.
//
// If ranks share the home (`collectives`), it has this rank's shard of every unit's trained slots, and of its frozen
// ones, one behind the other; all ranks compute the same, so that the mean of their gradients is each of them; and
// these have so few digits that the order of sums does not matter.
//
// A unit is a row of slots of 512 bytes (128 floats), and the first ones may be trained; a slot stands for a parameter.
// A visit enqueues on the compute stream: mix the leased weights, bit by bit, into the unit's result. A gradient is a
// function of that result and a running number, written into the open buffer as `TorchBridge` does it. Updates are
// AdamW on the pool, or a momentum step on the launching thread. So all that was read too early, too late, twice or not
// at all shows in the bits of results, weights, moments or held gradients: tests/python/engine/twin.py computes them
// slowly.
//
// Units: slots and elements. Ownership: owns home, results and engine; shares the backend. Order: the calls are the
// program. Threads: one call at a time.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/host_ticket.h"
#include "engine/engine.h"
#include "store/arena.h"
#include "testing/slow_pace.h"

namespace noria {

inline constexpr std::int64_t kSlotElements = 128;
inline constexpr Bytes kSlotBytes{512};

/// Where the model computes. `enqueue` queues work on a stream, or does it at once where that is null.
struct BareMachine {
  std::shared_ptr<Backend> backend;
  Stream stream;
  Stream other_stream;
  std::function<void(Stream, std::function<void()>)> enqueue;
  std::int64_t kernel_us = 0;  // what each piece of work takes at least
};

/// A host backend with a compute stream of its own, or (`asynchronous` false) one where the calling thread computes.
BareMachine make_host_machine(const Hostility& hostility, bool asynchronous);

struct BareUnit {
  int num_slots = 1;
  int num_trainable = 1;  // the first ones; 0: frozen
};

class BareEngine final : public EngineCallbacks {
 public:
  /// `drafts`: units that are trained have undo logs. `ring_slots`: for gradients; if there are any,
  /// updates run inside backward. `collectives`: of the ranks that share the home, if any;
  /// `assists`: they may run different modules.
  BareEngine(const std::vector<BareUnit>& units, BareMachine machine, Budget budget, bool prefetch_at_step,
             std::shared_ptr<HostOptimizer> optimizer, bool drafts = false, int ring_slots = 0,
             std::shared_ptr<Collectives> collectives = nullptr, bool assists = false);
  ~BareEngine() override;

  Engine& engine() { return engine_; }

  // ---- passes ----
  void begin_forward(std::int32_t root, bool training, bool grad_enabled);
  void begin_backward();
  void visit(std::int32_t hook, const std::vector<UnitId>& needs);
  /// From now on the model computes on the other stream, and orders nothing itself.
  void change_stream() { std::swap(machine_.stream, machine_.other_stream); }
  void leave() { engine_.leave(machine_.stream); }
  void gradient(std::size_t unit, std::size_t slot);
  void end_pass();
  /// The pass raised.
  void reset();

  // ---- the user's loop ----
  /// Halves a held gradient on the stream, as a clip would.
  void clip(std::size_t unit, std::size_t slot) { scale(unit, slot, 0.5F); }
  /// From now on the user may write this held gradient, and the engine is not told.
  void keep(std::size_t unit, std::size_t slot);
  /// Mixes a held gradient into the unit's result on the stream, as logging it would.
  void look(std::size_t unit, std::size_t slot);
  void zero_grad();
  /// From now on gradients stay on their rank, or are reduced over the ranks.
  void set_unsynced(bool unsynced);
  void begin_step() { engine_.begin_step(machine_.stream); }
  /// Issues the unit's update over the slots that have a gradient; no other unit is touched.
  void update(std::size_t unit, bool on_pool);
  /// Every unit that has a log may be drafted in the backward that follows, as if the next update had this rate; of
  /// the others the sums of squares may be taken.
  void expect_updates(double lr);
  /// Of the squares of what is held, by unit and slot.
  std::vector<double> sums();
  /// Before a backward with a ring: how to update every unit in it.
  void expect_in_backward();
  /// `step` after it.
  void claim();
  void end_step(bool blocking) { engine_.end_step(blocking); }
  /// The weights as the home has them now.
  std::vector<float> read_home(std::size_t unit);
  void write_home(std::size_t unit, float value);

  // ---- a peer, of machines of the host ----
  /// It lends `bytes` for copies of units.
  void lend(Bytes bytes);
  void keep_copies(const std::vector<UnitId>& units) { engine_.keep_copies(units); }
  /// The unit is written in the visit that is open, or in its next one: its copies are lost.
  void lose(std::size_t unit) { units_[unit].is_lost = true; }
  void shrink_copies(Bytes left) { engine_.copies()->shrink_peer(1, left); }

  // ---- failures ----
  void fail_next_update() { fail_next_update_ = true; }
  /// Nothing that comes later on the stream happens before `release_stream`.
  void hold_stream();
  void release_stream();
  /// Work that throws, which breaks a stream of the host.
  void break_stream();

  // ---- what came out; call `idle` first ----
  void await_stream();
  void idle();
  void close();
  std::vector<std::uint32_t> result(std::size_t unit) const { return units_[unit].result; }
  std::vector<float> array(const std::string& which, std::size_t unit) const;  // weights, held, moment1, moment2
  std::vector<std::uint8_t> arena() const;
  const Backend& backend() const { return *machine_.backend; }

  // ---- EngineCallbacks ----
  void attach(UnitId unit, std::byte* weights) override { of(unit).attached = weights; }
  bool evict(UnitId unit) override {
    of(unit).attached = nullptr;
    return !std::exchange(of(unit).is_lost, false);
  }
  void open_gradients(UnitId unit, std::byte* buffer) override;
  void close_gradients(UnitId unit, bool) override { of(unit).buffer = nullptr; }
  Ranges held_gradients(UnitId unit) const override;
  void held_moved(UnitId unit, std::byte* held) override {
    (shards_.size > 1 ? of(unit).unreduced : of(unit).home[1]) = reinterpret_cast<float*>(held);
  }
  void update(UnitId unit) override;
  Stream current_stream() const override { return machine_.stream; }
  std::pair<std::byte*, Bytes> more_home(Bytes least) override;
  std::byte* make_room(SavedId saved, Bytes bytes) override;
  void fill(SavedId saved, const std::byte* from, Bytes bytes) override;
  void release_saved(SavedId saved) override;

 private:
  void compute(std::function<void()> kernel);
  void scale(std::size_t unit, std::size_t slot, float factor);

  struct Slot {
    bool written = false;  // in the buffer that is open now
    bool arrived = false;  // in this backward
    bool held = false;     // the user sees a gradient
    bool guarded = false;  // an update may still read it
    bool kept = false;     // the user has a way to it that the engine does not hear
    bool pending = false;  // the deferred update has to do with it
    std::int64_t num_updates = 0;
  };
  struct Unit {
    std::vector<Slot> slots;
    std::array<float*, 4> home{};  // weights, held, moment1, moment2; of this rank
    bool is_drafted = false;
    float* unreduced = nullptr;   // whole gradients of this rank
    std::size_t num_at_home = 0;  // elements
    std::vector<std::uint32_t> result;
    std::byte* attached = nullptr;
    bool is_lost = false;
    std::byte* buffer = nullptr;
  };
  Unit& of(UnitId unit) { return units_[static_cast<std::size_t>(unit.value)]; }
  UndoLogSize log_size(const BareUnit& unit) const;
  Bytes log_bytes(const BareUnit& unit) const;
  UnitMap<EngineUnit> lay_out(const std::vector<BareUnit>& units, bool drafts, bool ring);
  EngineOptions options(Budget budget, bool prefetch_at_step, const std::vector<BareUnit>& units, int ring_slots,
                        const std::shared_ptr<Collectives>& collectives, bool assists);
  UpdateJob job_of(std::size_t unit, double lr, std::int64_t more);

  BareMachine machine_;
  std::shared_ptr<Backend> lender_;  // null: no peer lends
  Shards shards_;
  BufferTable buffers_;
  std::array<Arena, 4> home_;
  Arena logs_;
  Arena ring_, unreduced_;
  std::vector<Unit> units_;
  Phase phase_ = Phase::forward;
  std::uint32_t num_gradients_ = 0;
  bool fail_next_update_ = false;
  std::shared_ptr<HostTicket> stream_hold_;
  Engine engine_;  // last: it calls back into everything above
};

}  // namespace noria
