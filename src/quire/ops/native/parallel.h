// Threads of the kernels: torch's own, through the function that the loader passes in. A second pool of threads would
// compete with them for the cores.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "spin_pool.h"

namespace quire {

// `torch_parallel_for` of torch's stable C interface (torch 2.10 and later).
using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, void (*run)(int64_t, int64_t, void*),
                                void* context);
// `torch_get_num_threads` of the same interface.
using GetNumThreads = int32_t (*)(uint32_t* count);

extern ParallelFor parallel_for;
extern GetNumThreads get_num_threads;

// Returns the number of threads that may work at once.
inline int64_t max_threads() {
  if (spin_pool != nullptr) return spin_pool->num_threads;
  uint32_t num_threads = 1;
  if (parallel_for != nullptr && get_num_threads != nullptr) get_num_threads(&num_threads);
  return num_threads;
}

// Calls `body(begin, end)` on parts of [0, count), at least `grain` long; in the calling thread if that leaves one
// part.
template <typename Body>
void in_parallel(int64_t count, int64_t grain, Body body) {
  if (count <= grain || parallel_for == nullptr) {
    if (count > 0) body(int64_t(0), count);
    return;
  }
  const auto run = [](int64_t begin, int64_t end, void* context) { (*static_cast<Body*>(context))(begin, end); };
  if (SpinPool* const led = spin_pool) {
    spin_pool = nullptr;  // nested calls within a part do not use the pool
    led->share(count, std::max(grain, (count + led->num_threads - 1) / led->num_threads), run, &body);
    spin_pool = led;
    return;
  }
  parallel_for(0, count, grain, run, &body);
}

// Calls `body(job)` for each job in [0, count); a thread that becomes free takes the next job, because jobs differ in
// size.
template <typename Body>
void in_turns(int64_t count, Body body) {
  const int64_t num_threads = count > 1 ? max_threads() : 1;
  if (num_threads <= 1) {
    for (int64_t job = 0; job < count; ++job) body(job);
    return;
  }
  std::atomic<int64_t> next{0};
  in_parallel(std::min(num_threads, count), 1, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot)
      for (int64_t job = next++; job < count; job = next++) body(job);
  });
}

// Calls `body(job)` for each job in [0, count), where neighbouring jobs read neighbouring data: threads take runs of
// jobs, long runs first, so that the thread that prefetches data for the next job also reads it.
template <typename Body>
void in_runs(int64_t count, Body body) {
  const int64_t num_threads = count > 1 ? max_threads() : 1;
  std::atomic<int64_t> next{0};
  in_parallel(std::min(num_threads, count), 1, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      for (int64_t job = next; job < count;) {
        const int64_t run = std::max<int64_t>(1, (count - job) / (2 * num_threads));
        if (!next.compare_exchange_weak(job, job + run)) continue;
        for (const int64_t last = job + run; job < last; ++job) body(job);
        job = next;
      }
    }
  });
}

// Calls `body`, which calls kernels one after the other. The threads stay together for all of them: the first thread to
// arrive leads and makes the calls, and the others help with each.
template <typename Body>
void together(Body body) {
  const int64_t num_threads = max_threads();
  if (num_threads <= 1 || spin_pool != nullptr) return body();
  SpinPool pool(num_threads);
  std::atomic<bool> is_led{false};
  in_parallel(num_threads, 1, [&](int64_t, int64_t) {
    if (is_led.exchange(true)) return pool.help();
    spin_pool = &pool;
    body();
    spin_pool = nullptr;
    pool.end();
  });
}

}  // namespace quire
