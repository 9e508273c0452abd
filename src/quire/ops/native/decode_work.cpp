// The work of attention in captured decodes on a GPU, planned on the host and written to static memory; see
// `ops/triton/attention/decode_work.py`, which is the slow twin and says what the numbers mean.
#include "work_items.h"

namespace {

// Numbers before the items; among them, the number of items of shared tokens.
constexpr int64_t kHeader = 8, kSharedCount = 4;

// The decodes of a step, on the host; behind the real rows is padding of one token each.
struct DecodeRows {
  int64_t num_real;
  int64_t num_rows;
  const int64_t* positions;     // [num_rows]
  const int64_t* firsts;        // [num_rows], first token that each row sees
  const int64_t* block_starts;  // [num_rows], index of each row's first block
};

// Tokens that rows share; see `DecodeSharing` in decode_sharing.py.
struct DecodeSharing {
  int64_t num_rows;
  const int64_t* rows;
  const int64_t* ends;
  const int64_t* num_parts;
  int64_t num_items;
  const int32_t* items;
  const int64_t* item_rows;
  int64_t num_members;
  const int32_t* members;
  const int64_t* member_rows;
};

// How tokens are cut, and where the work is written.
struct DecodeWork {
  SplitRule splits;
  int64_t max_items;
  int64_t max_split;
  int64_t max_shared_items;
  int64_t max_shared_rows;
  int32_t* numbers;  // header, items, split rows
  int32_t* shared_items;
  int32_t* shared_rows;
  int64_t* own_firsts;  // [num_rows], scratch, as the next two
  int64_t* num_shared;
  int64_t* places;
};

}  // namespace

// Writes the slots of decodes, and their rows with padding: position 0 of the null block, which `null_start` is the
// index of. `window` and `chunk` are 0 for none.
QUIRE_EXPORT void quire_lay_decodes(int64_t num_real, int64_t num_rows, const int64_t* positions,
                                    const int64_t* block_ids, const int64_t* block_starts, int64_t null_start,
                                    int64_t block_size, int64_t window, int64_t chunk, int64_t* slots,
                                    int64_t* row_positions, int64_t* row_firsts, int64_t* row_starts) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t position = row < num_real ? positions[row] : 0;
    const int64_t start = row < num_real ? block_starts[row] : null_start;
    slots[row] = block_ids[start + position / block_size] * block_size + position % block_size;
    row_positions[row] = position;
    row_starts[row] = start;
    row_firsts[row] = chunk ? position / chunk * chunk : window ? std::max<int64_t>(0, position + 1 - window) : 0;
  }
}

// Writes the work of a step. Returns false where it has more than there is room for.
QUIRE_EXPORT bool quire_write_decodes(const DecodeRows* rows, const DecodeSharing* sharing, const DecodeWork* work) {
  std::copy_n(rows->firsts, rows->num_rows, work->own_firsts);
  std::fill_n(work->num_shared, rows->num_rows, 0);
  for (int64_t idx = 0; idx < sharing->num_rows; ++idx) {
    work->own_firsts[sharing->rows[idx]] = sharing->ends[idx];
    work->num_shared[sharing->rows[idx]] = sharing->num_parts[idx];
  }
  int64_t num_tokens = 0;
  for (int64_t row = 0; row < rows->num_real; ++row) num_tokens += rows->positions[row] + 1 - work->own_firsts[row];
  const int64_t length = work->splits.length(num_tokens);

  int32_t* item = work->numbers + kHeader;
  int32_t* const items_end = item + kItem * work->max_items;
  int32_t* split = items_end;
  int32_t* const split_end = split + kSplitRow * work->max_split;
  int64_t place = 0;
  for (int64_t row = 0; row < rows->num_rows; ++row) {
    const int64_t position = rows->positions[row], table = rows->block_starts[row];
    const int64_t first = work->own_firsts[row], end = position + 1;
    const int64_t start = first / work->splits.tile_tokens * work->splits.tile_tokens;
    const int64_t count = row < rows->num_real ? ceil_div(end - start, length) : 1;
    const int64_t num_before = work->num_shared[row], num_parts = count + num_before;
    const bool is_split = num_parts > 1;
    work->places[row] = place;
    if (item + kItem * count > items_end || (is_split && split == split_end)) return false;
    for (int64_t part = 0; part < count; ++part, item += kItem) {
      const int64_t begin = start + part * length;
      const int64_t numbers[kItem] = {row,
                                      1,
                                      position,
                                      table,
                                      std::max(begin, first),
                                      std::min(begin + length, end),
                                      is_split ? place + num_before + part : -1,
                                      0};
      for (int64_t idx = 0; idx < kItem; ++idx) item[idx] = int32_t(numbers[idx]);
    }
    if (!is_split) continue;
    const int64_t numbers[kSplitRow] = {row, 1, place, num_parts};
    for (int64_t idx = 0; idx < kSplitRow; ++idx) *split++ = int32_t(numbers[idx]);
    place += num_parts;
  }
  work->numbers[0] = int32_t((item - work->numbers - kHeader) / kItem);
  work->numbers[1] = int32_t((split - items_end) / kSplitRow);
  work->numbers[kSharedCount] = int32_t(sharing->num_items);

  if (sharing->num_items > work->max_shared_items || sharing->num_members > work->max_shared_rows) return false;
  for (int64_t idx = 0; idx < sharing->num_items; ++idx) {
    int32_t* const shared = std::copy_n(sharing->items + idx * kSharedItem, kSharedItem,
                                        work->shared_items + idx * kSharedItem) - kSharedItem;
    shared[kSharedTable] = int32_t(rows->block_starts[sharing->item_rows[idx]]);
  }
  for (int64_t idx = 0; idx < sharing->num_members; ++idx) {
    int32_t* const member = std::copy_n(sharing->members + idx * kSharedRow, kSharedRow,
                                        work->shared_rows + idx * kSharedRow) - kSharedRow;
    member[kSharedPlace] += int32_t(work->places[sharing->member_rows[idx]]);
  }
  return true;
}
