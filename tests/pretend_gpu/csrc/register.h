#pragma once

namespace pretend_gpu {

/// Once, after what is written by hand has registered itself: that has precedence.
void register_operators();

}  // namespace pretend_gpu
