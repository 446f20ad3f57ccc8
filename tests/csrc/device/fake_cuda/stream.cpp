#include "stream.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include <pthread.h>

namespace fake_cuda {
namespace {

// How long a patient waiter lets a lazy stream lie before he wants it himself.
constexpr std::chrono::milliseconds kPatience{20};

std::string name_of_this_thread() {
  char name[16] = {};
  pthread_getname_np(pthread_self(), name, sizeof(name));
  return name;
}

std::atomic<std::uint64_t> num_streams{0};

thread_local bool is_patient_stream = false;

}  // namespace

Pace& pace() {
  static Pace* the_pace = new Pace;  // streams outlive everything that could destroy it
  return *the_pace;
}

Waits& waits() {
  static Waits* the_waits = new Waits;
  return *the_waits;
}

void Pace::set_observers(std::vector<std::string> names) {
  const std::lock_guard lock(mutex_);
  observers_ = std::move(names);
}

bool Pace::is_observer() {
  if (is_patient_stream) return true;
  const std::lock_guard lock(mutex_);
  return !observers_.empty() && std::ranges::find(observers_, name_of_this_thread()) != observers_.end();
}

}  // namespace fake_cuda

using fake_cuda::pace;
using fake_cuda::WorkKind;

CUstream_st::CUstream_st(int device, bool is_patient)
    : device_(device),
      is_patient_(is_patient),
      number_(++fake_cuda::num_streams) {}

std::shared_ptr<CUstream_st> CUstream_st::start(int device, bool is_patient) {
  std::shared_ptr<CUstream_st> stream(new CUstream_st(device, is_patient));
  std::thread([stream] { stream->serve(); }).detach();
  return stream;
}

bool CUstream_st::may_run() const {
  return !queue_.empty() && (!pace().is_lazy || is_patient_ || is_closing_ || done_ < wanted_);
}

void CUstream_st::serve() {
  pthread_setname_np(pthread_self(), ("cuda:" + std::to_string(device_) + " #" + std::to_string(number_)).c_str());
  fake_cuda::is_patient_stream = is_patient_;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return pace().is_stopping || is_closing_ || may_run(); });
    if (pace().is_stopping || queue_.empty()) break;
    Item item = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    if (item.delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(item.delay_us));
    item.work();
    item.work = nullptr;  // before anybody sees it done
    lock.lock();
    ++done_;
    if (item.kind != WorkKind::free) --slots_taken_;
    changed_.notify_all();
  }
  std::deque<Item> dropped;
  dropped.swap(queue_);
  lock.unlock();
  dropped.clear();
  lock.lock();
  has_ended_ = true;
  changed_.notify_all();
}

std::int64_t CUstream_st::next_delay_us() {
  const std::int64_t most = pace().max_delay_us;
  if (most <= 0) return 0;
  // By the stream, so that threads which race for several streams do not change what each of them draws.
  if (seeded_with_ != pace().seed) random_.seed((seeded_with_ = pace().seed) * 1'000'003 + number_);
  if (static_cast<int>(random_() % 100) >= pace().delayed_percent) return 0;
  return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(most + 1));
}

std::uint64_t CUstream_st::enqueue(Work work, WorkKind kind) {
  std::unique_lock lock(mutex_);
  if (kind != WorkKind::free && slots_taken_ >= fake_cuda::kQueueSlots) {
    ++fake_cuda::waits().full_queue;
    while (slots_taken_ >= fake_cuda::kQueueSlots && !pace().is_stopping && !has_ended_) {
      want(done_ + 1);
      changed_.wait(lock);
    }
  }
  if (pace().is_stopping || has_ended_) {
    lock.unlock();
    work = nullptr;
    return 0;
  }
  queue_.push_back({std::move(work), kind, kind == WorkKind::kernel ? next_delay_us() : 0});
  if (kind != WorkKind::free) ++slots_taken_;
  const std::uint64_t position = ++queued_;
  changed_.notify_all();
  return position;
}

std::uint64_t CUstream_st::end() const {
  const std::lock_guard lock(mutex_);
  return queued_;
}

bool CUstream_st::has_passed(std::uint64_t position) const {
  const std::lock_guard lock(mutex_);
  return done_ >= position;
}

void CUstream_st::want(std::uint64_t position) {
  if (wanted_ >= position) return;
  wanted_ = position;
  changed_.notify_all();
}

bool CUstream_st::poll(std::uint64_t position) {
  const std::lock_guard lock(mutex_);
  if (done_ >= position) return true;
  if (++polls_ >= fake_cuda::kPatientPolls) {
    polls_ = 0;
    want(position);
  }
  return false;
}

bool CUstream_st::wait_until(std::uint64_t position) {
  std::unique_lock lock(mutex_);
  const auto is_over = [&] { return done_ >= position || pace().is_stopping || has_ended_; };
  if (is_over()) return false;
  if (pace().is_observer()) changed_.wait_for(lock, fake_cuda::kPatience, is_over);
  want(position);
  changed_.wait(lock, is_over);
  return true;
}

void CUstream_st::close() {
  const std::lock_guard lock(mutex_);
  is_closing_ = true;
  changed_.notify_all();
}

void CUstream_st::wake() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void CUstream_st::await_ended() {
  std::unique_lock lock(mutex_);
  changed_.notify_all();
  changed_.wait(lock, [this] { return has_ended_; });
}
