// Sums and exchanges between the ranks of one host through memory that all of them map: tensor parallelism takes two
// sums in each layer, which through sockets would take longer than some layers do.
//
// Every rank takes part in the same operations in the same order. An operation is a turn. In it a rank writes to one of
// its two slots, says so by setting its turn, and reads the slots of others once these have set theirs. A slot is
// written again two turns later; by then its readers have arrived at the turn in between, which the writer waits for.
//
// Each rank also says what it does in a turn: a sum, a gathering or a message, and of how many bytes. Ranks that differ
// have planned different steps, so what is in their slots is not used: the operation ends with an error, or the next
// one does where a rank has nothing to read.
//
// A wait first polls, then sleeps on a futex of the word that it waits for. It ends with an error where a rank was
// reported to have failed, or where the time is over.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <ctime>
#include <cstdint>
#include <cstring>

#include "parallel.h"
#include "vec.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {

constexpr int64_t kMaxRanks = 64;

// The beginning of the memory: a line for each rank.
struct RankLine {
  alignas(64) std::atomic<uint32_t> turn;   // last turn that the rank has arrived at
  std::atomic<uint32_t> num_sleepers;       // ranks that sleep until it arrives
  std::atomic<uint64_t> operations[2];      // of its last two turns, at turn % 2; see `operation`
};

struct SharedPage {
  alignas(64) std::atomic<uint32_t> failed;  // rank + 1 of one that has failed; 0 while none has
  RankLine ranks[kMaxRanks];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "the words are shared by processes");

enum class Kind : uint64_t { Sum = 1, Gather, Message };

// What all ranks do in a turn: the kind in the highest byte, and the number of bytes.
inline uint64_t operation(Kind kind, int64_t num_bytes) { return uint64_t(kind) << 56 | uint64_t(num_bytes); }

// A rank's own view of the group; the caller in Python has the same structure.
struct RankGroup {
  SharedPage* page;
  char* slots;  // [size, 2, slot_bytes]
  int64_t rank;
  int64_t size;
  int64_t slot_bytes;
  int64_t turn;          // of the last operation
  int64_t spin_us;       // of polling before sleep
  int64_t timeout_us;    // of a whole wait
};

// 0, or the rank that failed + 1, or -1 - the rank that did not arrive in time, or kDiffers - the rank that does
// something else than this one.
using Status = int64_t;
constexpr Status kDiffers = -1 - kMaxRanks;

inline char* slot_of(const RankGroup& group, int64_t rank) {
  return group.slots + (rank * 2 + group.turn % 2) * group.slot_bytes;
}

inline bool has_arrived(uint32_t turn, int64_t wanted) { return int32_t(turn - uint32_t(wanted)) >= 0; }

inline void sleep_on(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
  // Ends by itself, so that a rank that was reported to have failed is noticed.
  const timespec limit{0, 20'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);
#else
  std::this_thread::yield();
#endif
}

inline void wake(RankLine& line) {
#if defined(__linux__)
  if (line.num_sleepers.load() != 0) syscall(SYS_futex, &line.turn, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// Waits until a rank has arrived at a turn.
inline Status wait_for(const RankGroup& group, int64_t rank, int64_t turn, int64_t timeout_us) {
  using Clock = std::chrono::steady_clock;
  RankLine& line = group.page->ranks[rank];
  if (has_arrived(line.turn.load(std::memory_order_acquire), turn)) return 0;
  const auto start = Clock::now();
  const auto elapsed_us = [&] {
    return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start).count();
  };
  const auto polls = [&] {
    for (int look = 0; look < 64; ++look) {
      if (has_arrived(line.turn.load(std::memory_order_acquire), turn)) return true;
#if defined(__x86_64__)
      _mm_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
    return false;
  };
  do {
    if (polls()) return 0;
  } while (elapsed_us() < group.spin_us);
  line.num_sleepers.fetch_add(1);
  Status status = 0;
  // A process that was stopped, or a machine that was asleep, has not waited meanwhile.
  int64_t last_us = elapsed_us(), waited_us = std::min<int64_t>(last_us, group.spin_us);
  for (uint32_t seen = line.turn.load(); !has_arrived(seen, turn); seen = line.turn.load()) {
    const uint32_t failed = group.page->failed.load();
    if (failed != 0) {
      status = failed;
      break;
    }
    const int64_t now_us = elapsed_us();
    waited_us += std::min<int64_t>(now_us - last_us, 100'000);
    last_us = now_us;
    if (waited_us >= timeout_us) {
      status = -1 - rank;
      break;
    }
    sleep_on(line.turn, seen);
  }
  line.num_sleepers.fetch_sub(1);
  return status;
}

// Waits until a rank has arrived at this rank's last turn, to do the same.
inline Status meet(const RankGroup& group, int64_t rank) {
  const Status status = wait_for(group, rank, group.turn, group.timeout_us);
  if (status != 0) return status;
  const auto done_by = [&](int64_t which) {
    return group.page->ranks[which].operations[group.turn % 2].load(std::memory_order_relaxed);
  };
  return done_by(rank) == done_by(group.rank) ? 0 : kDiffers - rank;
}

inline Status meet_all(const RankGroup& group) {
  for (int64_t rank = 0; rank < group.size; ++rank) {
    if (rank == group.rank) continue;
    const Status status = meet(group, rank);
    if (status != 0) return status;
  }
  return 0;
}

// Begins an operation: afterwards the rank's own slot may be written.
inline Status begin(RankGroup& group) {
  const uint32_t failed = group.page->failed.load(std::memory_order_relaxed);
  if (failed != 0) return failed;
  const Status status = meet_all(group);  // these have read what the slot held
  if (status == 0) ++group.turn;
  return status;
}

// Says that the rank has written its slot for an operation, or has nothing to write.
inline void arrive(const RankGroup& group, uint64_t operation) {
  RankLine& line = group.page->ranks[group.rank];
  line.operations[group.turn % 2].store(operation, std::memory_order_relaxed);
  line.turn.store(uint32_t(group.turn));
  wake(line);
}

// Returns the sum of the values of ranks from `first` on, added as a tree: of four ranks, that of both pairs. So ranks
// add up slices of a sum as one process does; see `num_slices_of` in grouped_rows.h.
template <typename Value, typename ValueOf>
QUIRE_INLINE Value sum_of_ranks(int64_t size, ValueOf value_of) {
  Value halves[7];  // of up to 64 ranks
  Value sum{};
  for (int64_t rank = 0; rank < size; ++rank) {
    sum = value_of(rank);
    int level = 0;
    for (int64_t rest = rank; rest % 2 == 1; rest /= 2) sum = halves[level++] + sum;
    halves[level] = sum;
  }
  // Subtrees that have no other half.
  int64_t rest = size;
  int level = 0;
  for (; rest % 2 == 0; rest /= 2) ++level;
  for (rest /= 2, ++level; rest > 0; rest /= 2, ++level)
    if (rest % 2 == 1) sum = halves[level] + sum;
  return sum;
}

// Adds the slots of all ranks, in float32, then `residual`, if there is one: every rank gets the same bits.
template <typename T>
void add_slots(const RankGroup& group, int64_t count, const T* residual, T* output) {
  in_parallel(count, int64_t(1) << 14, [&](int64_t begin, int64_t end) {
    int64_t idx = begin;
    for (; idx + kLanes <= end; idx += kLanes) {
      Floats sum = sum_of_ranks<Floats>(group.size, [&](int64_t rank) {
        return load(reinterpret_cast<const T*>(slot_of(group, rank)) + idx);
      });
      if (residual != nullptr) sum = sum + load(residual + idx);
      store(output + idx, sum);
    }
    for (; idx < end; ++idx) {
      float sum = sum_of_ranks<float>(group.size, [&](int64_t rank) {
        return widen(reinterpret_cast<const T*>(slot_of(group, rank))[idx]);
      });
      if (residual != nullptr) sum += widen(residual[idx]);
      narrow(output + idx, sum);
    }
  });
}

// Ends a sum: the rank has written its part to its slot.
template <typename T>
Status end_sum(RankGroup& group, int64_t count, const T* residual, T* output) {
  arrive(group, operation(Kind::Sum, count * int64_t(sizeof(T))));
  const Status status = meet_all(group);
  if (status == 0) add_slots(group, count, residual, output);
  return status;
}

}  // namespace quire
