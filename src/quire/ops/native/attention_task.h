// Attention of a job's query rows over its context, tile by tile, with a running softmax between two matrix products
// (FlashAttention, arXiv 2205.14135).
//
//   rows    keys and values                               softmax
//   1..4    read in place                                 row by row
//   ..12    keys and values packed into panels            row by row
//   more    keys read in place, values packed; the rows   all lanes at once
//           are packed into panels, one row per lane
//
// A deterministic plan does not use the first path; the other two give a row the same bits.
#pragma once

#include <algorithm>

#include "attention_layer.h"
#include "cache.h"
#include "row_panels.h"

namespace {

using quire::Job;
using quire::kPartTokens;
using quire::kRows;

constexpr int kTokens = kTileTokens;
// Up to this number of rows, packing the keys takes less time than computing with one lane for each row.
constexpr int kPackedRows = 12;

static_assert(kPartTokens % kTokens == 0);

// Partial result of the softmax of rows over a part of their context.
struct PartialSoftmax {
  alignas(64) float sums[kRows * kMaxDim];
  alignas(64) float largest[kRows];  // largest score, as an exponent of two
  alignas(64) float total[kRows];    // sum of the weights relative to `largest`

  void clear(int num_rows, int head_dim) {
    for (int row = 0; row < num_rows; ++row) {
      std::memset(sums + row * kMaxDim, 0, head_dim * sizeof(float));
      largest[row] = -kInfinity;
      total[row] = 0.0f;
    }
  }

  // Merges the result of the tokens that follow.
  void join(const PartialSoftmax& next, int num_rows, int head_dim);
};

// Buffers of one thread: at most 1.1 MiB, a third of which is used for heads of 128 in bfloat16.
template <typename Steps>
struct Scratch {
  using Value = typename Steps::Value;
  alignas(64) Value queries[kRows * kMaxDim];  // row by row, or in panels
  alignas(64) Value keys[kTokens * kMaxDim];   // likewise
  alignas(64) Value values[kTokens * kMaxDim];
  alignas(64) float scores[kRows * kTokens];
  alignas(64) Value weights[kRows * kTokens];
  PartialSoftmax part;    // current part
  PartialSoftmax before;  // parts before the current one
  alignas(64) float rescale[kRows];
  Scales scales;
#if defined(QUIRE_HAS_BYTE_ROWS)
  SplitInt16Row byte_queries[kFewRows], byte_weights[kFewRows];
#endif
  const Value* places[kTokens];
  int num_rows;
  int64_t first[kRows];  // first token that a row sees
  int64_t last[kRows];   // end of the tokens that a row sees
};

// Tokens that are processed together.
template <typename S>
struct Tile {
  int num_tokens;
  int num_missing;          // number of leading tokens that no row sees
  const S* slots[kTokens];  // address of each token's key; for a missing token, another token's

  // Looks up the slots of the tokens from `start` to the start of the next tile, without those outside of the job.
  void find(const Layer& layer, int64_t kv_head, const Job& job, const int64_t* table, int64_t start) {
    const Cache& cache = layer.cache;
    const int64_t end = std::min(job.end, (start / kTokens + 1) * kTokens);
    num_tokens = int(std::max<int64_t>(0, end - start));
    num_missing = int(std::max<int64_t>(0, job.begin - start));
    int64_t block = (start + num_missing) / cache.block_size, offset = (start + num_missing) % cache.block_size;
    for (int token = num_missing; token < num_tokens; ++block, offset = 0) {
      const S* slot = cache.slot<const S>(table[block], layer.idx, 0, kv_head, offset);
      for (; offset < cache.block_size && token < num_tokens; ++offset, ++token, slot += cache.slot_bytes / sizeof(S))
        slots[token] = slot;
    }
    for (int token = 0; token < num_missing; ++token) slots[token] = slots[num_missing];
  }
};

// Merges a row's result for one or more parts into its result for the parts before them (whose total is 0, and whose
// sums are unspecified, if there are none). Never inlined: one function gives the same bits wherever it is called.
__attribute__((noinline)) void merge_partial(const float* sums, float largest, float total, int head_dim,
                                             float* sums_before, float& largest_before, float& total_before) {
  if (total == 0.0f) return;
  if (total_before == 0.0f) {
    std::memcpy(sums_before, sums, head_dim * sizeof(float));
    largest_before = largest;
    total_before = total;
    return;
  }
  const float highest = largest > largest_before ? largest : largest_before;
  const float factor = power_of_two<false>(splat(largest - highest))[0];
  const float factor_before = power_of_two<false>(splat(largest_before - highest))[0];
  largest_before = highest;
  total_before = total_before * factor_before + total * factor;
  for (int dim = 0; dim < head_dim; ++dim) sums_before[dim] = sums_before[dim] * factor_before + sums[dim] * factor;
}

void PartialSoftmax::join(const PartialSoftmax& next, int num_rows, int head_dim) {
  for (int row = 0; row < num_rows; ++row)
    merge_partial(next.sums + row * kMaxDim, next.largest[row], next.total[row], head_dim, sums + row * kMaxDim,
                  largest[row], total[row]);
}

// Computes a job for one KV head. Rows have the type T, slots the type S: the same type, or int8 with scales.
template <typename Steps, typename T, typename S>
class AttentionTask {
 public:
  AttentionTask(const Layer& layer, const Job& job, int64_t kv_head, Scratch<Steps>& scratch)
      : layer_(layer),
        job_(job),
        kv_head_(kv_head),
        scratch_(scratch),
        head_dim_(int(layer.cache.head_dim)),
        to_values_(layer.cache.num_kv_heads * layer.cache.block_size * layer.cache.slot_bytes / int64_t(sizeof(S))) {}

  // Processes the context and returns the partial result of the rows.
  const PartialSoftmax& run() {
    const bool is_deterministic = layer_.plan.is_deterministic;
    const int64_t seq = layer_.plan.query_tiles[layer_.plan.splits[job_.first_split].query_tile].seq;
    const int64_t* table = layer_.rows.block_ids + layer_.rows.block_starts[seq];
    // The column of a token must not depend on the position at which another row's mask range begins.
    start_ = is_deterministic ? job_.begin / kTokens * kTokens : job_.begin;
    next_.find(layer_, kv_head_, job_, table, start_);
    // An int8 vector is followed by its scale.
    constexpr int scale_bytes = kHasScales ? int(sizeof(float)) : 0;
    for (int token = next_.num_missing; token < next_.num_tokens; ++token)
      for (int dim = 0; dim < head_dim_ + scale_bytes; dim += int(64 / sizeof(S))) fetch(next_.slots[token] + dim);
    gather();
    const int num_rows = scratch_.num_rows;
    // Otherwise a chunk of a prompt processes its whole context as one part.
    const bool has_parts = is_deterministic && job_.begin / kPartTokens != (job_.end - 1) / kPartTokens;
    PartialSoftmax &part = scratch_.part, &before = scratch_.before;
    part.clear(num_rows, head_dim_);
    if (has_parts) before.clear(num_rows, head_dim_);
    for (int64_t next_start; start_ < job_.end; start_ = next_start) {
      tile_ = next_;
      next_start = (start_ / kTokens + 1) * kTokens;
      next_.find(layer_, kv_head_, job_, table, next_start);
      meet();
      if (has_parts && (next_start % kPartTokens == 0 || next_start >= job_.end)) {
        before.join(part, num_rows, head_dim_);
        part.clear(num_rows, head_dim_);
      }
    }
    return has_parts ? before : part;
  }

 private:
  using Value = typename Steps::Value;
  static constexpr bool kHasScales = std::is_same_v<S, int8_t>;

  // Copies the rows of the job's query tiles, row by row or into panels.
  void gather() {
    const AttentionPlan& plan = layer_.plan;
    const T* queries[kRows];
    int row = 0;
    for (int64_t split = job_.first_split; split < job_.first_split + job_.num_splits; ++split) {
      const QueryTile& query_tile = plan.query_tiles[plan.splits[split].query_tile];
      const int64_t to_position = layer_.rows.context_lens[query_tile.seq] - layer_.rows.row_starts[query_tile.seq + 1];
      for (int64_t tile_row = 0; tile_row < query_tile.num_rows; ++tile_row, ++row) {
        const int64_t position = to_position + layer_.row_of(query_tile, tile_row);
        queries[row] = layer_.query<T>(query_tile, tile_row, kv_head_);
        scratch_.first[row] = plan.mask.first_seen(position);
        scratch_.last[row] = position + 1;
      }
    }
    scratch_.num_rows = row;
    is_few_ = !plan.is_deterministic && row <= kFewRows && head_dim_ % (2 * kLanes) == 0;
    in_panels_ = row > kPackedRows;
    if (in_panels_) {
      pack_columns<Steps, T>(queries, 0, row, head_dim_, scratch_.queries);
      // The unused lanes of the last vector repeat the last row.
      for (int lane = row; lane < round_up(row, kLanes); ++lane) {
        scratch_.first[lane] = scratch_.first[row - 1];
        scratch_.last[lane] = scratch_.last[row - 1];
        scratch_.part.largest[lane] = -kInfinity;
        scratch_.part.total[lane] = 0.0f;
      }
    } else {
      for (int idx = 0; idx < row; ++idx)
        for (int dim = 0; dim < head_dim_; ++dim)
          narrow(scratch_.queries + idx * head_dim_ + dim, widen(queries[idx][dim]));
    }
    if constexpr (kHasByteRows) read_byte_queries();
  }

  // Processes a tile for all rows of the job.
  void meet() {
    if constexpr (kHasByteRows) {
      if (are_bytes_) return with_few(scratch_.num_rows, [&](auto few) { meet_bytes<few.value>(); });
    }
    if constexpr (kHasScales) Scales::read(tile_.slots, 0, tile_.num_tokens, head_dim_, scratch_.scales.keys);
    if (is_few_) {
      with_few(scratch_.num_rows, [&](auto few) { meet_few<few.value>(); });
    } else if (in_panels_) {
      meet_panels();
    } else {
      meet_packed();
    }
  }

  // Called only after the values have been prefetched: when they come from memory, reading the scales earlier would
  // wait for every other cache line of the values.
  void read_scales_of_values() {
    if constexpr (kHasScales) {
      Scales::read(tile_.slots, to_values_, tile_.num_tokens, head_dim_, scratch_.scales.values);
      for (int token = 0; token < tile_.num_missing; ++token) scratch_.scales.values[token] = 0.0f;
    }
  }

  const Scales* scales() const { return kHasScales ? &scratch_.scales : nullptr; }

  // Returns the index of a token within the tile, clamped to the tile's ends.
  int in_tile(int64_t token) const { return int(std::clamp<int64_t>(token - start_, 0, tile_.num_tokens)); }

  void weigh_rows() {
    read_scales_of_values();
    for (int row = 0; row < scratch_.num_rows; ++row)
      scratch_.rescale[row] =
          weigh(scratch_.scores + row * kTokens, in_tile(scratch_.first[row]), in_tile(scratch_.last[row]),
                tile_.num_tokens, layer_.scale, layer_.cap, scales(), scratch_.weights + row * kTokens,
                scratch_.part.largest[row], scratch_.part.total[row]);
  }

  // Replaces the addresses of the tile's keys by those of its values.
  void turn_to_values() {
    static constexpr S kNothing[kMaxDim]{};
    for (int token = 0; token < tile_.num_tokens; ++token)
      tile_.slots[token] = token < tile_.num_missing ? kNothing : tile_.slots[token] + to_values_;
  }

  template <int kCount>
  void meet_few() {
    score<Steps, kCount>(scratch_.queries, tile_.slots, to_values_, tile_.num_tokens, head_dim_, scratch_.scores,
                         kTokens);
    weigh_rows();
    turn_to_values();
    add_values<Steps, kCount>(scratch_.weights, kTokens, tile_.slots, next_.slots, tile_.num_tokens, next_.num_tokens,
                              head_dim_, scratch_.part.sums, kMaxDim, scratch_.rescale);
  }

#if defined(QUIRE_HAS_BYTE_ROWS)
  static constexpr bool kHasByteRows = kHasScales && std::is_same_v<T, BFloat16>;

  void read_byte_queries() {
    are_bytes_ = is_few_ && head_dim_ % kByteDims == 0;
    for (int row = 0; are_bytes_ && row < scratch_.num_rows; ++row)
      scratch_.byte_queries[row].read(scratch_.queries + row * head_dim_, head_dim_);
  }

  template <int kCount>
  void meet_bytes() {
    score_bytes<kCount>(scratch_.byte_queries, tile_.slots, to_values_, tile_.num_tokens, head_dim_, scratch_.scores,
                        kTokens, scratch_.scales.keys);
    weigh_rows();
    for (int row = 0; row < kCount; ++row)
      scratch_.byte_weights[row].read(scratch_.weights + row * kTokens, round_up(tile_.num_tokens, kLanes));
    turn_to_values();
    add_bytes<kCount>(scratch_.byte_weights, tile_.slots, next_.slots, tile_.num_tokens, next_.num_tokens, head_dim_,
                      scratch_.part.sums, kMaxDim, scratch_.rescale);
  }
#else
  static constexpr bool kHasByteRows = false;
  void read_byte_queries();
  template <int kCount>
  void meet_bytes();
#endif

  void meet_packed() {
    pack_columns<Steps, S>(tile_.slots, to_values_, tile_.num_tokens, head_dim_, scratch_.keys);
    multiply<Steps>(scratch_.queries, head_dim_, scratch_.keys, head_dim_ / Steps::kValues, scratch_.scores, kTokens,
                    nullptr, scratch_.num_rows, tile_.num_tokens);
    weigh_rows();
    turn_to_values();
    pack_values<Steps, S>(tile_.slots, next_.slots, tile_.num_tokens, next_.num_tokens, head_dim_, scratch_.values);
    const int depth = (tile_.num_tokens + Steps::kValues - 1) / Steps::kValues;
    multiply<Steps>(scratch_.weights, kTokens, scratch_.values, depth, scratch_.part.sums, kMaxDim, scratch_.rescale,
                    scratch_.num_rows, head_dim_);
  }

  void meet_panels() {
    const int num_rows = scratch_.num_rows, num_panels = (num_rows + kPanel - 1) / kPanel;
    constexpr int scale_width = kHasScales ? int(sizeof(float)) : 0;
    const Value* const* keys =
        widen_vectors<Steps, S>(tile_.slots, tile_.num_tokens, head_dim_, scratch_.keys, scratch_.places);
    Span spans[kRows / kPanel];
    VectorPrefetch<S> values(tile_.slots, to_values_, tile_.num_tokens, head_dim_ + scale_width,
                             num_panels * (tile_.num_tokens / kTileRows) + 1);
    for (int row = 0; row < num_rows; row += kPanel) {
      const int count = std::min(kPanel, num_rows - row);
      const Span span = spans[row / kPanel] = find_span(row, count);
      score_panel<Steps>(keys, span, scratch_.queries + row * head_dim_, count, head_dim_ / Steps::kValues,
                         scratch_.scores, values);
      if (row == 0) read_scales_of_values();
      if (!span.is_empty()) weigh_panel(row, count, span);
    }
    turn_to_values();
    const int depth = (tile_.num_tokens + Steps::kValues - 1) / Steps::kValues;
    pack_values<Steps, S>(tile_.slots, next_.slots, tile_.num_tokens, 0, head_dim_, scratch_.values);
    VectorPrefetch<S> next_keys(next_.slots, 0, next_.num_tokens, head_dim_ + scale_width,
                                (head_dim_ + kPanel - 1) / kPanel * (num_rows / kTileRows));
    for (int dim = 0; dim < head_dim_; dim += kPanel) {
      for (int row = 0; row < num_rows; row += kPanel) {
        const Span span = spans[row / kPanel];
        if (span.is_empty()) continue;
        const int begin = span.begin / Steps::kValues;
        const int end = std::min(depth, (span.end + Steps::kValues - 1) / Steps::kValues);
        add_panel<Steps>(scratch_.weights + row * kTokens + span.begin * kPanel, std::min(kPanel, num_rows - row),
                         scratch_.values + (dim * depth + begin * kPanel) * Steps::kValues, end - begin,
                         std::min(kPanel, head_dim_ - dim), scratch_.part.sums + row * kMaxDim + dim, kMaxDim,
                         scratch_.rescale + row, next_keys);
      }
    }
  }

  // Returns the range of the tile's tokens that at least one of `count` rows sees, in whole vectors.
  Span find_span(int row, int count) const {
    const int64_t first = *std::min_element(scratch_.first + row, scratch_.first + row + count);
    const int64_t last = *std::max_element(scratch_.last + row, scratch_.last + row + count);
    const int begin = in_tile(first) / kLanes * kLanes, end = in_tile(last);
    return {begin, std::min(tile_.num_tokens, round_up(end, kLanes))};
  }

  void weigh_panel(int row, int count, Span span) {
    const Span result{span.begin, round_up(span.end, kLanes)};
    PartialSoftmax& part = scratch_.part;
    for (int lane = row; lane < row + count; lane += kLanes) {
      Lanes lanes{load(part.largest + lane), load(part.total + lane), {}, {}, {}};
      bool sees_all = true;
      for (int idx = 0; idx < kLanes; ++idx) {
        lanes.first[idx] = in_tile(scratch_.first[lane + idx]);
        lanes.last[idx] = in_tile(scratch_.last[lane + idx]);
        sees_all = sees_all && lanes.first[idx] <= result.begin && lanes.last[idx] >= result.end;
      }
      const int of_panel = lane - row;
      weigh_lanes<Steps>(scratch_.scores + of_panel, result, layer_.scale, layer_.cap, scales(),
                         scratch_.weights + row * kTokens + of_panel * Steps::kValues, sees_all, lanes);
      store(part.largest + lane, lanes.largest);
      store(part.total + lane, lanes.total);
      store(scratch_.rescale + lane, lanes.rescale);
    }
  }

  const Layer& layer_;
  const Job& job_;
  const int64_t kv_head_;
  Scratch<Steps>& scratch_;
  const int head_dim_;
  const int64_t to_values_;  // offset from a token's key to its value
  bool is_few_;
  bool in_panels_;
  bool are_bytes_ = false;  // rows are split into bytes and multiplied by int8 vectors
  int64_t start_;           // position of the tile's first token
  Tile<S> tile_, next_;
};

}  // namespace
