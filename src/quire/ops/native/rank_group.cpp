// Operations of a group of ranks, each with all ranks; see rank_group.h. They return a status, 0 for success.
#include "rank_group.h"

#include "activation_functions.h"
#include "cache.h"

using quire::RankGroup;
using quire::Status;

QUIRE_EXPORT int64_t quire_page_bytes() { return sizeof(quire::SharedPage); }

// Marks a rank as failed: waits of all ranks end.
QUIRE_EXPORT void quire_fail(RankGroup* group, int64_t rank) {
  uint32_t none = 0;
  group->page->failed.compare_exchange_strong(none, uint32_t(rank + 1));
}

// Sums `x` [count] over all ranks and adds `residual` [count], if there is one. `output` may be either of them.
QUIRE_EXPORT Status quire_all_reduce(RankGroup* group, int64_t type, const void* x, const void* residual, int64_t count,
                                     void* output) {
  Status status = 0;
  with_type(static_cast<Type>(type), [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    const T *from = static_cast<const T*>(x), *start = static_cast<const T*>(residual);
    T* to = static_cast<T*>(output);
    const int64_t part = group->slot_bytes / int64_t(sizeof(T));
    for (int64_t done = 0; done < count && status == 0; done += part) {
      const int64_t num_values = std::min(part, count - done);
      status = quire::begin(*group);
      if (status != 0) return;
      std::memcpy(slot_of(*group, group->rank), from + done, num_values * sizeof(T));
      status = quire::end_sum(*group, num_values, start == nullptr ? nullptr : start + done, to + done);
    }
  });
  return status;
}

// Gathers the columns of all ranks on rank 0. Each has `rows` [num_rows, widths[rank]] bytes, which follow each other
// in the rows of `output` [num_rows, sum of widths], of rank 0 alone.
QUIRE_EXPORT Status quire_gather(RankGroup* group, const char* rows, int64_t num_rows, const int64_t* widths,
                                 char* output) {
  int64_t total = 0, widest = 1;
  for (int64_t rank = 0; rank < group->size; ++rank) {
    total += widths[rank];
    widest = std::max(widest, widths[rank]);
  }
  const int64_t part = group->slot_bytes / widest;  // rows of a turn
  if (part == 0) return INT64_MIN;
  const int64_t own = widths[group->rank];
  for (int64_t done = 0; done < num_rows; done += part) {
    const int64_t count = std::min(part, num_rows - done);
    Status status = quire::begin(*group);
    if (status != 0) return status;
    if (group->rank != 0) std::memcpy(slot_of(*group, group->rank), rows + done * own, count * own);
    quire::arrive(*group, quire::operation(quire::Kind::Gather, count * total));
    if (group->rank != 0) continue;
    int64_t column = 0;
    for (int64_t rank = 0; rank < group->size; column += widths[rank++]) {
      const char* from = rows + done * own;
      if (rank != 0) {
        status = quire::meet(*group, rank);
        if (status != 0) return status;
        from = slot_of(*group, rank);
      }
      for (int64_t row = 0; row < count; ++row)
        std::memcpy(output + (done + row) * total + column, from + row * widths[rank], widths[rank]);
    }
  }
  return 0;
}

// Sends bytes of rank 0 to all others: the slot has their number, then as many of them as there is room for.
QUIRE_EXPORT Status quire_send(RankGroup* group, const char* bytes, int64_t num_bytes) {
  const int64_t room = group->slot_bytes - int64_t(sizeof(int64_t));
  int64_t done = 0;
  do {
    const Status status = quire::begin(*group);
    if (status != 0) return status;
    const int64_t count = std::min(room, num_bytes - done);
    char* slot = slot_of(*group, 0);
    std::memcpy(slot, &num_bytes, sizeof(int64_t));
    std::memcpy(slot + sizeof(int64_t), bytes + done, count);
    quire::arrive(*group, quire::operation(quire::Kind::Message, count));
    done += count;
  } while (done < num_bytes);
  return 0;
}

// Waits for a message of rank 0, for some time at most; returns its number of bytes in `num_bytes`. Nothing has
// changed where the time is over.
QUIRE_EXPORT Status quire_await(RankGroup* group, int64_t timeout_us, int64_t* num_bytes) {
  const Status status = quire::wait_for(*group, 0, group->turn + 1, timeout_us);
  if (status != 0) return status;
  const int64_t next = (group->turn + 1) % 2;
  const uint64_t sent = group->page->ranks[0].operations[next].load(std::memory_order_relaxed);
  if (sent >> 56 != uint64_t(quire::Kind::Message)) return quire::kDiffers;
  std::memcpy(num_bytes, group->slots + next * group->slot_bytes, sizeof(int64_t));
  return 0;
}

// Reads the message that `quire_await` has found.
QUIRE_EXPORT Status quire_receive(RankGroup* group, char* bytes, int64_t num_bytes) {
  const int64_t room = group->slot_bytes - int64_t(sizeof(int64_t));
  int64_t done = 0;
  do {
    Status status = quire::begin(*group);
    if (status == 0) status = quire::wait_for(*group, 0, group->turn, group->timeout_us);
    if (status != 0) return status;
    const int64_t count = std::min(room, num_bytes - done);
    std::memcpy(bytes + done, slot_of(*group, 0) + sizeof(int64_t), count);
    quire::arrive(*group, quire::operation(quire::Kind::Message, count));
    done += count;
  } while (done < num_bytes);
  return 0;
}
