#include "optim/host_optimizer.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/task_arena.h>

#include "base/errors.h"
#include "base/mutex.h"
#include "device/lane_ledger.h"
#include "device/own_thread.h"
#include "device/timing.h"
#include "optim/factored.h"
#include "optim/muon.h"
#include "optim/parallel.h"
#include "optim/update_queue.h"

namespace noria {
namespace {

tbb::task_arena::constraints place_of(const HostOptimizerOptions& options) {
  tbb::task_arena::constraints place;
  const std::vector<tbb::numa_node_id> known = tbb::info::numa_nodes();
  if (std::find(known.begin(), known.end(), options.numa_node) != known.end()) place.set_numa_id(options.numa_node);
  return place;
}

int threads_for(const HostOptimizerOptions& options) {
  const int requested = options.num_threads;
  if (requested < 0) throw UsageError("num_threads >= 0", std::to_string(requested), "0 lets noria choose");
  if (requested > 0) return requested;
  tbb::task_arena::constraints place = place_of(options);
  const int all = tbb::info::default_concurrency(place);
  const int cores = tbb::info::default_concurrency(place.set_max_threads_per_core(1));
  return chosen_threads(all, cores, options.is_beside_device);
}

std::exception_ptr closed_error() {
  return std::make_exception_ptr(MachineError("the host optimizer was closed before this update could run"));
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an error without a text";
  }
}

bool is_pool_verb(Verb verb) {
  return verb == Verb::update || verb == Verb::draft || verb == Verb::undo || verb == Verb::sum;
}

/// Returns true if a redo asks for what the draft has computed.
bool is_as_drafted(const UpdateJob& redo) {
  return std::all_of(redo.pieces.begin(), redo.pieces.end(),
                     [](const UpdatePiece& piece) { return have_same_bits(piece.scalars, piece.drafted); });
}

/// Returns about how many bytes a redo moves that only updates the blocks that were left out.
Bytes bytes_left_out(const UpdateJob& redo) {
  std::int64_t num_blocks = 0;
  for (const UpdatePiece& piece : redo.pieces) num_blocks += num_undo_blocks(piece.count);
  return Bytes{redo.bytes().count / num_blocks * redo.progress->num_left_out};
}

}  // namespace

struct HostOptimizer::State {
  explicit State(const HostOptimizerOptions& options)
      : num_threads(threads_for(options)),
        pace(options.pace),
        arena(place_of(options).set_max_concurrency(num_threads)) {
    // TBB starts no more workers than there are cores unless this allows it. More are slower, but the user asked for
    // them.
    if (num_threads > tbb::info::default_concurrency()) {
      more_threads.emplace(tbb::global_control::max_allowed_parallelism, static_cast<std::size_t>(num_threads));
    }
    thread = std::thread([this] { serve(); });
  }

  void serve();
  /// Call it in an exception handler. Notes that the handled exception broke the job off, or kept it from beginning.
  void note_torn(const QueuedUpdate& update, bool has_begun);
  void run(QueuedUpdate& update, bool was_ready, std::int64_t idle_since_ns);
  /// Leaves only the pieces that the job wants, and fills `numbers`.
  void choose_wanted(UpdateJob& job);
  /// Returns how many bytes it read and wrote.
  Bytes compute(UpdateJob& job);

  const pid_t pid = getpid();
  const int num_threads;
  const std::shared_ptr<Pace> pace;
  LaneLedger ledger;
  const std::shared_ptr<UpdateQueue> queue = std::make_shared<UpdateQueue>();
  std::once_flag closed;
  mutable Mutex torn_mutex;
  std::map<UnitId, std::string> torn NORIA_GUARDED_BY(torn_mutex);

  // Only the serving thread uses these, and the tasks that it waits for.
  std::optional<tbb::global_control> more_threads;
  tbb::task_arena arena;
  std::vector<UpdateChunk> chunks;  // kept between jobs: it does not grow in a steady state
  std::vector<double> sums;         // by chunk
  FactoredUpdate factored;
  std::vector<std::size_t> numbers;  // by wanted piece, its number in the job; empty: all are wanted
  std::int64_t free_ns = 0;          // when the job before this one was due to end; 0: it did not run

  std::thread thread;
};

void HostOptimizer::State::serve() {
  begin_own_thread("update");
  while (true) {
    const std::int64_t idle_since_ns = now_ns();
    const UpdateQueue::Taken taken = queue->take();
    if (!taken.item) break;
    run(*taken.item, taken.was_ready, idle_since_ns);
  }
  for (const UpdateQueue::Item& item : queue->take_rest()) {
    item->waits.clear();  // else a ticket that is never given would hold the item, and the item that ticket
    item->ticket->fail(closed_error());
  }
}

void HostOptimizer::State::run(QueuedUpdate& update, bool was_ready, std::int64_t idle_since_ns) {
  const std::int64_t previous_end_ns = std::exchange(free_ns, 0);
  std::vector<OpId> waited_on;
  try {
    for (const Ticket& wait : std::exchange(update.waits, {})) {
      waited_on.push_back(wait->label.op);
      was_ready = was_ready && wait->passed();
      wait->wait_passed();
    }
  } catch (...) {
    if (!update.is_recalled) note_torn(update, /*has_begun=*/false);
    update.ticket->fail(std::current_exception());
    return;
  }
  if (update.is_recalled) {
    free_ns = previous_end_ns;
    update.ticket->pass();
    return;
  }
  if (!was_ready && !waited_on.empty()) {
    const std::int64_t since_ns = std::max(idle_since_ns, update.submitted_ns);
    ledger.stalled(update.label, update.last_giver, std::max<std::int64_t>(0, now_ns() - since_ns));
  }

  const std::int64_t hold_us = pace->before_us(Lane::update, update.label.verb);
  if (hold_us > 0 && !queue->sleep_until(now_ns() + hold_us * 1000)) {
    update.ticket->fail(closed_error());
    return;
  }
  try {
    choose_wanted(update.job);
    // Under a limit, a job that directly follows another starts when that one was due to end. So sleeps that are a
    // little too long do not add up.
    const bool is_limited = pace->least_ns(Lane::update, update.job.bytes()) > 0;
    const bool back_to_back = is_limited && was_ready && hold_us == 0 && previous_end_ns != 0;
    const std::int64_t start_ns = back_to_back ? previous_end_ns : now_ns();
    ledger.works(Lane::update, start_ns);
    const Bytes bytes = compute(update.job);
    free_ns = std::max(now_ns(), start_ns + pace->least_ns(Lane::update, bytes));
    ledger.works(Lane::update, start_ns, free_ns);
    queue->sleep_until(free_ns);
    ledger.transferred(update.label, start_ns, free_ns, bytes, std::move(waited_on));
  } catch (...) {
    note_torn(update, /*has_begun=*/true);
    ledger.stopped(Lane::update);
    update.ticket->fail(std::current_exception());
    return;
  }
  update.ticket->pass();
}

void HostOptimizer::State::choose_wanted(UpdateJob& job) {
  if (job.sums) job.sums->assign(job.pieces.size(), 0.0);
  numbers.clear();
  if (!job.wants) return;
  std::vector<UpdatePiece> wanted;
  for (std::size_t i = 0; i < job.pieces.size(); ++i) {
    if (!job.wants(i)) continue;
    wanted.push_back(job.pieces[i]);
    numbers.push_back(i);
  }
  job.pieces = std::move(wanted);
}

// An update that does not begin tears the step, because other units are updated. So does an undo of a draft that has
// begun.
void HostOptimizer::State::note_torn(const QueuedUpdate& update, bool has_begun) {
  const Verb verb = update.label.verb;
  const bool is_torn =
      has_begun ? verb != Verb::sum : verb == Verb::update || (verb == Verb::undo && update.job.progress->has_begun);
  if (!is_torn) return;
  const MutexLock lock(torn_mutex);
  torn.emplace(update.label.unit, text_of(std::current_exception()));
}

Bytes HostOptimizer::State::compute(UpdateJob& job) {
  const bool is_scaled = take_up_late_scales(job);
  if (job.progress && job.task != UpdateTask::draft && !job.progress->has_begun) {
    // The draft's waits have failed, so its log is of an earlier one.
    if (job.task == UpdateTask::undo) return Bytes{0};
    job.task = UpdateTask::update;
    job.log = {};
  }
  Bytes moved = job.bytes();
  if (job.task == UpdateTask::redo) {
    if (job.looks) ++(is_scaled ? job.looks->changed : job.looks->unchanged);
    if (is_as_drafted(job)) {
      if (job.progress->num_left_out == 0) return Bytes{0};
      moved = bytes_left_out(job);
    }
  }
  if (job.task == UpdateTask::draft) begin_draft(job);
  const bool is_whole = !is_elementwise(job.rule) && job.task == UpdateTask::update;
  if (is_whole && !job.sums) chunks.clear();
  else cut_into_chunks(job.pieces, chunks);
  if (job.sums) sums.assign(chunks.size(), 0.0);
  for_each_number(arena, chunks.size(), [&](std::size_t i) {
    const UpdateChunk& chunk = chunks[i];
    if (job.sums) {
      sums[i] = sum_of_squares(job, job.pieces[chunk.piece], chunk.offset, chunk.count);
    }
    if (job.task == UpdateTask::sum || is_whole) return;
    update_elements(job, job.pieces[chunk.piece], chunk.offset, chunk.count);
    pace->part_done();
  });
  if (is_whole) {
    const auto for_each = [&](std::size_t count, const auto& each) { for_each_number(arena, count, each); };
    const auto part_done = [&] { pace->part_done(); };
    if (job.rule == UpdateRule::muon) run_muon(job, for_each, part_done);
    else factored.run(job, for_each, part_done);
  }
  if (job.task == UpdateTask::draft) job.progress->num_left_out = job.log.header->num_left;
  for (std::size_t i = 0; i < chunks.size() && job.sums; ++i) {
    const std::size_t piece = chunks[i].piece;
    (*job.sums)[numbers.empty() ? piece : numbers[piece]] += sums[i];
  }
  return moved;
}

HostOptimizer::HostOptimizer(const HostOptimizerOptions& options) : state_(std::make_unique<State>(options)) {}

HostOptimizer::~HostOptimizer() {
  // A forked child has no thread to join. Threads that it does not have may hold the locks of TBB and noria.
  if (getpid() != state_->pid) {
    (void)state_.release();  // NOLINT(bugprone-unused-return-value): leaked on purpose
    return;
  }
  close();
}

Ticket HostOptimizer::submit(const OpLabel& label, UpdateJob job, std::vector<Ticket> waits, int priority) {
  if (getpid() != state_->pid) {
    throw UsageError("updates in the process that made the optimizer", "a forked child of it",
                     "wrap the model in the process that trains it");
  }
  NORIA_INVARIANT(label.lane == Lane::update && is_pool_verb(label.verb),
                  "an update, a draft, its undo or a sum belongs on the update lane");
  check(job);
  auto item = std::make_shared<QueuedUpdate>();
  item->label = label;
  item->job = std::move(job);
  item->waits = std::move(waits);
  item->ticket = std::make_shared<HostTicket>(label);
  item->priority = priority;
  item->submitted_ns = now_ns();
  Ticket ticket = item->ticket;
  const bool taken = state_->queue->push(item);
  NORIA_INVARIANT(taken, "an update was submitted to a closed host optimizer");
  return ticket;
}

bool HostOptimizer::recall(const Ticket& ticket) {
  if (getpid() != state_->pid) return false;
  return state_->queue->recall(ticket);
}

std::map<UnitId, std::string> HostOptimizer::torn() const {
  const MutexLock lock(state_->torn_mutex);
  return state_->torn;
}

void HostOptimizer::clear_torn() {
  const MutexLock lock(state_->torn_mutex);
  state_->torn.clear();
}

bool HostOptimizer::is_queued(const Ticket& ticket) const {
  return getpid() == state_->pid && state_->queue->holds(ticket);
}

void HostOptimizer::idle() {
  if (getpid() == state_->pid) state_->queue->await_idle();
}

void HostOptimizer::close() {
  if (getpid() != state_->pid) return;
  std::call_once(state_->closed, [this] {
    state_->queue->close();
    state_->thread.join();
  });
}

std::int64_t HostOptimizer::busy_us() const { return state_->ledger.busy_us(Lane::update); }

LaneStats HostOptimizer::stats() const { return state_->ledger.stats(Lane::update); }

void HostOptimizer::set_update_time(std::shared_ptr<UpdateTime> update_time) {
  state_->ledger.set_update_time(std::move(update_time));
}

void HostOptimizer::set_trace(std::shared_ptr<Trace> trace) { state_->ledger.set_trace(std::move(trace)); }

int HostOptimizer::num_threads() const { return state_->num_threads; }

}  // namespace noria
