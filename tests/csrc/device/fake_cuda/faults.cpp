#include "faults.h"

#include <atomic>
#include <csignal>
#include <cstdio>

#include <execinfo.h>
#include <pthread.h>
#include <unistd.h>

#include "memory.h"

namespace fake_cuda {
namespace {

struct sigaction before;
thread_local const char* what_this_thread_does = nullptr;
std::atomic<void (*)(int, const void*)> describe_further{nullptr};

// The handler in charge may have kept ours as the one before it, and call ours again: then this is the end.
std::atomic<bool> has_passed_on{false};

void pass_on(int signal, siginfo_t* info, void* context) {
  if (has_passed_on.exchange(true)) {
    ::signal(signal, SIG_DFL);
    raise(signal);
    return;
  }
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
    before.sa_sigaction(signal, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(signal);
  }
  // If that returns, the access is made again, and faults again: now for good.
  ::signal(signal, SIG_DFL);
}

void report(int signal, siginfo_t* info, void* context) {
  const int fd = STDERR_FILENO;
  if (info->si_code > 0 && memory().describe(fd, info->si_addr)) {
    char name[16] = {};
    pthread_getname_np(pthread_self(), name, sizeof(name));
    dprintf(fd, "pretend GPU: %s touched device memory at %p (above: where that is), thread \"%s\"\n",
            what_this_thread_does == nullptr ? "the host" : what_this_thread_does, info->si_addr, name);
    if (auto* further = describe_further.load()) further(fd, info->si_addr);
    void* frames[64];
    backtrace_symbols_fd(frames, backtrace(frames, 64), fd);
  }
  pass_on(signal, info, context);
}

}  // namespace

void report_faults() {
  void* frame = nullptr;
  backtrace(&frame, 1);  // loads what it needs, which a handler could not
  struct sigaction ours{};
  struct sigaction replaced{};
  ours.sa_sigaction = &report;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGSEGV, &ours, &replaced);
  if ((replaced.sa_flags & SA_SIGINFO) == 0 || replaced.sa_sigaction != &report) before = replaced;
}

void doing(const char* what) { what_this_thread_does = what; }

void describe_further_by(void (*describe)(int, const void*)) { describe_further = describe; }

}  // namespace fake_cuda
