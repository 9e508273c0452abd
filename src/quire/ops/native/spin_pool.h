// Threads that stay together for many calls of kernels. To hand a kernel's work to threads that wait for it is a matter
// of a cache line; to wake them up and to send them back to sleep for each kernel takes longer than some kernels do.
//
// One of them leads: it makes the calls, and opens what can be shared. The others look out for that and take parts of
// it. Nobody waits for one that does not come, whose core may be busy with something else: the leader takes all parts
// that are left, and then waits only for those who are in the middle of one.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {

// Looks at something again and again, and lets other threads of the system go first when it takes long.
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

  const int64_t num_threads;  // that there may be

  // In the leader: has `run` called on parts of [0, count), each of `part` but the last, and returns when all is done.
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

  // In the leader: there is no more to come.
  void end() { turn_.store(kOver); }

  // In the others: takes parts until then.
  void help() {
    uint64_t seen = 0;
    for (SpinBackoff backoff;;) {
      const uint64_t turn = turn_.load();
      if (turn == kOver) return;
      if (turn % 2 == 0 || turn == seen) {
        backoff.wait();
        continue;
      }
      // Either the leader closes behind this, and waits, or it has closed, which is seen here.
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

  // On lines of their own: what is looked at all the time, what each part changes, who is at work.
  alignas(64) std::atomic<uint64_t> turn_{0};
  int64_t count_, part_;
  Run run_;
  void* context_;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> num_helping_{0};
};

// That this thread leads; null where it leads none.
inline thread_local SpinPool* spin_pool = nullptr;

}  // namespace quire
