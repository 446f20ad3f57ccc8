// Random numbers of the pretend GPU: a seed and an offset, as Philox has them; the state of a CUDA generator in torch.
//
// Order: an operator draws its numbers from what it takes here on the host, when it is launched. So they do not depend
// on when the stream comes to it. Threads: any, under the generator's own mutex.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>

namespace pretend_gpu {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

/// The seed of one operator's numbers. A generator of the CPU is refused, as CUDA does.
std::uint64_t take_seed(const std::optional<at::Generator>& given, int device);

}  // namespace pretend_gpu
