#include "device/kernel_images.h"

#include <array>

#if defined(NORIA_FLUSHING_IMAGE)

// Puts a file into the read-only data of this object.
#define NORIA_EMBED(name, path) \
  __asm__(".section .rodata\n.balign 16\n" name ":\n.incbin \"" path "\"\n.byte 0\n.previous\n")

NORIA_EMBED("noria_flushing_image", NORIA_FLUSHING_IMAGE);
NORIA_EMBED("noria_keeping_image", NORIA_KEEPING_IMAGE);
extern "C" {
[[gnu::visibility("hidden")]] extern const unsigned char noria_flushing_image[];
[[gnu::visibility("hidden")]] extern const unsigned char noria_keeping_image[];
}

namespace noria {

std::span<const void* const> kernel_images() {
  static const std::array<const void*, 2> images{noria_flushing_image, noria_keeping_image};
  return images;
}

}  // namespace noria

#else

namespace noria {

std::span<const void* const> kernel_images() { return {}; }

}  // namespace noria

#endif
