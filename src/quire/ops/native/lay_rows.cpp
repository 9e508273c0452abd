// The rows of a step laid out on the host, whatever computes it; the slow twins are loops in `execution/step/batch.py`.
#include <algorithm>

#include "cache.h"

// Writes the positions [starts, ends) of sequences one behind the other.
QUIRE_EXPORT void quire_lay_positions(int64_t num_seqs, const int64_t* starts, const int64_t* ends,
                                      int64_t* positions) {
  for (int64_t seq = 0; seq < num_seqs; ++seq)
    for (int64_t position = starts[seq]; position < ends[seq]; ++position) *positions++ = position;
}

// Writes the blocks of sequences up to their ends one behind the other, and the slots of their tokens [starts, ends).
QUIRE_EXPORT void quire_lay_slots(int64_t num_seqs, const int64_t* starts, const int64_t* ends,
                                  const int64_t* const* tables, int64_t block_size, int64_t* block_ids,
                                  int64_t* slots) {
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t* const table = tables[seq];
    block_ids = std::copy_n(table, (ends[seq] + block_size - 1) / block_size, block_ids);
    for (int64_t position = starts[seq]; position < ends[seq];) {
      const int64_t block = position / block_size, stop = std::min((block + 1) * block_size, ends[seq]);
      for (int64_t slot = table[block] * block_size + position % block_size; position < stop; ++position)
        *slots++ = slot++;
    }
  }
}
