// Names noria's own threads (of lanes, of the host pool, those that register memory), and knows them again. Such a
// thread stays on a device once it has been set to it.
//
// Threads: each function is about the calling thread.
#pragma once

#include <string>

namespace noria {

/// Call it first on such a thread. `name` appears in debuggers, after "noria-" and cut to 15 characters.
void begin_own_thread(const std::string& name);

/// Returns true on a thread that has called `begin_own_thread`.
bool is_own_thread();

}  // namespace noria
