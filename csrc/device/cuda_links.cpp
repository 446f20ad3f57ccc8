#include "device/cuda_links.h"

#include <set>
#include <utility>

namespace noria {

CudaLinks::CudaLinks(CudaDevice device, std::shared_ptr<EventPool> events)
    : device_(std::move(device)),
      events_(std::move(events)) {}

void CudaLinks::copy(const std::vector<CopySpan>& copies, cuda::StreamHandle lane) {
  std::vector<Other*> links;  // by copy; null: the lane's own stream
  std::set<Other*> used;
  for (const CopySpan& span : copies) {
    links.push_back(other(span.link));
    if (links.back() != nullptr) used.insert(links.back());
  }
  if (!used.empty()) device_.check(device_->EventRecord(forked_, lane), "cudaEventRecord");
  for (Other* link : used) device_.check(device_->StreamWaitEvent(link->stream, forked_, 0), "cudaStreamWaitEvent");
  try {
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const CopySpan& span = copies[i];
      device_.check(device_->MemcpyAsync(span.to, span.from, static_cast<std::size_t>(span.bytes.count),
                                         cuda::kDeviceToDevice, links[i] == nullptr ? lane : links[i]->stream),
                    "cudaMemcpyAsync", span.bytes);
    }
    for (Other* link : used) {
      device_.check(device_->EventRecord(link->joined, link->stream), "cudaEventRecord");
      device_.check(device_->StreamWaitEvent(lane, link->joined, 0), "cudaStreamWaitEvent");
    }
  } catch (...) {  // the lane's next op must not overlap with copies that are still under way
    for (Other* link : used) {
      if (device_->StreamSynchronize(link->stream) != cuda::kSuccess) device_.forget_error();
    }
    throw;
  }
}

cuda::Error CudaLinks::close() {
  cuda::Error first = cuda::kSuccess;
  for (auto& [link, other] : others_) {
    const cuda::Error error = other.stream == nullptr ? cuda::kSuccess : device_->StreamDestroy(other.stream);
    if (first == cuda::kSuccess) first = error;
    if (other.joined != nullptr) events_->give_back(other.joined);
  }
  if (forked_ != nullptr) events_->give_back(forked_);
  others_.clear();
  forked_ = nullptr;
  return first;
}

CudaLinks::Other* CudaLinks::other(int link) {
  if (link == first_.value_or(link)) {
    first_ = link;
    return nullptr;
  }
  Other& found = others_[link];  // if something cannot be made, the next op tries again
  if (forked_ == nullptr) forked_ = events_->take();
  if (found.joined == nullptr) found.joined = events_->take();
  if (found.stream == nullptr) {
    device_.check(device_->StreamCreateWithFlags(&found.stream, cuda::kStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  return &found;
}

}  // namespace noria
