// How long DistributedDataParallel's passes take on the device: torch has this for CUDA in a CUDA build only, and DDP
// does without it on no device.
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <map>

#include "streams.h"

namespace pretend_gpu {
namespace {

class DdpTimer final : public c10d::Timer {
 public:
  explicit DdpTimer(c10::Device device) : device_(device.index()) {}
  ~DdpTimer() override {
    for (const auto& [which, event] : events_) cudaEventDestroy(event);
  }

  void record(Event which) override {
    Timer::record(which);
    cudaEvent_t& event = events_[which];
    if (event == nullptr) event = make_event(device_, /*has_timing=*/true);
    record_event(event, current_stream(device_));
  }
  std::optional<std::int64_t> measureDifference(Event start, Event end) override {
    if (!events_.count(start) || !events_.count(end)) return std::nullopt;
    for (const Event which : {start, end}) check(cudaEventSynchronize(events_.at(which)), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, events_.at(start), events_.at(end)), "cudaEventElapsedTime");
    if (milliseconds < 0) return std::nullopt;
    return static_cast<std::int64_t>(milliseconds * 1e6F);
  }

 private:
  const int device_;
  std::map<Event, cudaEvent_t> events_;
};

}  // namespace
}  // namespace pretend_gpu

namespace c10d {
using pretend_gpu::DdpTimer;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, DdpTimer)
}  // namespace c10d
