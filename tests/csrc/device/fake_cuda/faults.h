// What a process says before it dies of touching device memory as if it were its own: which device, which allocation,
// where in it, who, and the way there.
//
// On a GPU such an access is a segmentation fault, too (by the host), or an illegal memory access (by a kernel).
#pragma once

namespace fake_cuda {

/// Takes over SIGSEGV; what was in charge of it before goes on afterwards. Call it again after another handler took
/// it over, which would not tell the address (faulthandler does not).
void report_faults();

/// What the calling thread does now, for the report: a text that lives on. Null: nothing of interest.
void doing(const char* what);

/// Called with an address in device memory; writes one more line about it to `fd`, without waiting.
void describe_further_by(void (*describe)(int fd, const void* address));

}  // namespace fake_cuda
