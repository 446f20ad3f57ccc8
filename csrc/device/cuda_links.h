// Gives the peer lane on CUDA one stream for each link, so that copies over different links run in parallel.
//
// Note [Links]. The link that the peer lane sees first uses the lane's own stream. Every other link has a stream of its
// own, made at its first use. If an op uses other links, it forks their streams from the lane's stream after the op's
// waits. It joins them to the lane's stream before the op's fills and event. So links order nothing by themselves, and
// a wait for the lane is a wait for all its links. Every op records the fork and join events again. That is safe,
// because a waiting stream has captured the earlier record.
//
// Ownership: owns its events and the streams of the other links, until `close`.
// Threads: only the lane's thread, until `close`.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "device/cuda_ticket.h"

namespace noria {

class CudaLinks {
 public:
  CudaLinks(CudaDevice device, std::shared_ptr<EventPool> events);

  void copy(const std::vector<CopySpan>& copies, cuda::StreamHandle lane);
  /// Destroys the streams. Call it after the lane's stream was synchronized. Returns the first failure.
  cuda::Error close();

 private:
  struct Other {
    cuda::StreamHandle stream = nullptr;
    cuda::EventHandle joined = nullptr;
  };
  Other* other(int link);

  const CudaDevice device_;
  const std::shared_ptr<EventPool> events_;
  std::optional<int> first_;
  std::map<int, Other> others_;
  cuda::EventHandle forked_ = nullptr;
};

}  // namespace noria
