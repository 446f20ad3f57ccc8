// The streams of the peer lane on CUDA: one for each link, so that copies over different links go side by side.
//
// Note [Links]. The link that the peer lane sees first has the lane's own stream, every other one a stream of its own,
// made when it is first used. An op that uses others forks them from the lane's stream, behind the op's waits, and
// joins them to it before its fills and its event. So links order nothing by themselves, and whoever waits for the lane
// waits for all of them. Fork and join are events that are recorded again in every op: a stream that waits has captured
// the record.
//
// Ownership: owns the other links' streams, until `close`. Threads: the lane's thread alone, until `close`.
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
  /// After the lane's stream was synchronized. Returns the first failure.
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
