#pragma once

#include <cstdint>
#include <functional>

namespace agl {

// Threads for a job that writes `bytes`: AGL_NUM_THREADS where set, else the cores this process may
// use, at most eight; one for jobs too small to be worth a thread.
int64_t threads_for(int64_t bytes);

// Calls job(begin, end) on slices of [0, count), one a thread, and waits for all of them. The job
// must not throw.
void parallel_slices(int64_t count, int64_t threads,
                     const std::function<void(int64_t, int64_t)>& job);

}  // namespace agl
