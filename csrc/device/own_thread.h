// Names the threads that noria makes, and knows them again.
//
// Threads: each function is about the calling thread.
#pragma once

#include <string>

namespace noria {

/// Call it first on a thread of noria's. `name` appears in debuggers, after "noria-" and cut to 15 characters.
void begin_own_thread(const std::string& name);

/// Returns true on a thread that has called `begin_own_thread`. Other threads are the user's, torch's or TBB's.
bool is_own_thread();

}  // namespace noria
