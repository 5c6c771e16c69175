#include "core/parallel.h"

#include <algorithm>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

namespace agl {
namespace {

constexpr int64_t kMaxThreads = 8;
constexpr int64_t kBytesWorthAThread = 1 << 20;

int64_t available_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  return static_cast<int64_t>(std::thread::hardware_concurrency());
}

int64_t max_threads() {
  if (const char* text = std::getenv("AGL_NUM_THREADS")) {
    const long count = std::strtol(text, nullptr, 10);
    if (count > 0) return count;
  }
  return std::clamp<int64_t>(available_cores(), 1, kMaxThreads);
}

}  // namespace

int64_t threads_for(int64_t bytes) {
  return std::clamp<int64_t>(bytes / kBytesWorthAThread, 1, max_threads());
}

void parallel_slices(int64_t count, int64_t threads,
                     const std::function<void(int64_t, int64_t)>& job) {
  threads = std::clamp<int64_t>(threads, 1, std::max<int64_t>(count, 1));
  std::vector<std::thread> workers;
  workers.reserve(static_cast<std::size_t>(threads - 1));
  for (int64_t slice = 1; slice < threads; ++slice) {
    workers.emplace_back(job, slice * count / threads, (slice + 1) * count / threads);
  }
  job(0, count / threads);
  for (std::thread& worker : workers) worker.join();
}

}  // namespace agl
