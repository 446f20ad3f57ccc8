#include "device/own_thread.h"

#include <pthread.h>

#include "device/timing.h"

namespace noria {
namespace {

thread_local bool is_own = false;

}  // namespace

void begin_own_thread(const std::string& name) {
  is_own = true;
  pthread_setname_np(pthread_self(), ("noria-" + name).substr(0, 15).c_str());
  ask_for_precise_sleep();
}

bool is_own_thread() { return is_own; }

}  // namespace noria
