// Threads that stay together for many calls of kernels. Passing a kernel's work to spinning threads costs a transfer of
// a cache line; waking threads up and putting them to sleep for each kernel takes longer than some kernels do.
//
// One thread, the leader, makes the calls and opens work that can be shared. The other threads poll for it and take
// parts. No thread waits for one that does not arrive, whose core may be busy with other work: the leader takes all
// parts that are left, and then waits only for threads that are computing a part.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {

// Delay between two polls, which yields to other threads of the system when the wait becomes long.
class SpinBackoff {
 public:
  void wait() {
    if (++num_looks_ > kLooks) return std::this_thread::yield();
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

 private:
  static constexpr int kLooks = 4096;  // about 100 microseconds

  int num_looks_ = 0;
};

class SpinPool {
 public:
  using Run = void (*)(int64_t begin, int64_t end, void* context);

  explicit SpinPool(int64_t num_threads) : num_threads(num_threads) {}

  const int64_t num_threads;  // maximum number of threads

  // Called by the leader: runs `run` on parts of [0, count), each of length `part` except the last, and returns when
  // all are done.
  void share(int64_t count, int64_t part, Run run, void* context) {
    count_ = count;
    part_ = part;
    run_ = run;
    context_ = context;
    next_.store(0, std::memory_order_relaxed);
    turn_.fetch_add(1);  // odd: open
    take_parts();
    turn_.fetch_add(1);
    for (SpinBackoff backoff; num_helping_.load() != 0;) backoff.wait();
  }

  // Called by the leader: ends `help` in the other threads.
  void end() { turn_.store(kOver); }

  // Called by the other threads: takes parts until `end`.
  void help() {
    uint64_t seen = 0;
    for (SpinBackoff backoff;;) {
      const uint64_t turn = turn_.load();
      if (turn == kOver) return;
      if (turn % 2 == 0 || turn == seen) {
        backoff.wait();
        continue;
      }
      // Either the leader closes the turn after this increment, and waits, or the turn is closed already, which the
      // load sees.
      num_helping_.fetch_add(1);
      if (turn_.load() == turn) take_parts();
      num_helping_.fetch_sub(1);
      seen = turn;
      backoff = SpinBackoff();
    }
  }

 private:
  static constexpr uint64_t kOver = ~uint64_t(1);

  void take_parts() {
    for (int64_t begin = next_.fetch_add(part_); begin < count_; begin = next_.fetch_add(part_))
      run_(begin, std::min(count_, begin + part_), context_);
  }

  // On separate cache lines: the word that is polled, the counter that each part changes, and the number of helpers.
  alignas(64) std::atomic<uint64_t> turn_{0};
  int64_t count_, part_;
  Run run_;
  void* context_;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> num_helping_{0};
};

// Pool that this thread leads, or null.
inline thread_local SpinPool* spin_pool = nullptr;

}  // namespace quire
