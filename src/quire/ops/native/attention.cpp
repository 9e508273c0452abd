// Attention read straight from block tables, for any mixture of single rows (decode), few rows (verified drafts) and
// chunks of prompts.
//
// The query rows of one KV head (all heads of its group, for some tokens of one sequence, or of several that share
// blocks) meet a tile of keys and values at a time: both are packed into panels that stay in the CPU's cache, and two
// small products with a running softmax between them do the rest (FlashAttention, arXiv 2205.14135; block tables:
// PagedAttention, arXiv 2309.06180).
//
// Under a deterministic plan a row gets the same bits whatever rows are beside it, in its sequence or in others: tiles
// and parts begin at multiples of their lengths, parts are joined from front to back, whoever computed them, and all
// jobs take the path of many rows. Under others a row's bits depend on how many rows its job has, and on what its
// sequence shares.
#include "attention_plan.h"

#include <algorithm>
#include <memory>

#include "cache.h"
#include "parallel.h"
#include "tiles.h"

namespace {

using quire::AttentionPlan;
using quire::Job;
using quire::kPartTokens;
using quire::kRows;
using quire::Piece;
using quire::Strip;

constexpr int kTokens = kTileTokens;

static_assert(kPartTokens % kTokens == 0);

// What some rows have collected of a context.
struct Collected {
  alignas(64) float sums[kRows * kMaxDim];
  float largest[kRows];  // score
  float total[kRows];    // of the weights relative to it

  void clear(int num_rows, int head_dim) {
    for (int row = 0; row < num_rows; ++row) {
      std::memset(sums + row * kMaxDim, 0, head_dim * sizeof(float));
      largest[row] = -kInfinity;
      total[row] = 0.0f;
    }
  }

  // Adds what follows.
  void join(const Collected& next, int num_rows, int head_dim);
};

// One thread's tiles: 600 KiB at most, a third of it touched for heads of 128 in bfloat16.
template <typename Steps>
struct Scratch {
  using Value = typename Steps::Value;
  alignas(64) Value queries[kRows * kMaxDim];
  alignas(64) Value keys[kTokens * kMaxDim];
  alignas(64) Value values[kTokens * kMaxDim];
  alignas(64) float scores[kRows * kTokens];
  alignas(64) Value weights[kRows * kTokens];
  Collected part;    // of the part at hand
  Collected before;  // of the parts before it
  float rescale[kRows];
  Scales scales;
  int num_rows;
  int64_t positions[kRows];
};

// A layer's queries and outputs, and all that its jobs share.
struct Layer {
  const StepRows& rows;
  const Cache& cache;
  AttentionPlan& plan;
  int64_t idx;
  const void* queries;  // [rows, heads, head dim]
  int64_t row_stride;
  float scale;
  void* output;  // [rows, heads, head dim], contiguous

  // A strip's row, as the step counts rows.
  int64_t row_of(const Strip& strip, int64_t row) const {
    return rows.row_starts[strip.seq] + (strip.first_row + row) / plan.group;
  }
  // A strip's row, as the query heads of a step's row are counted.
  int64_t head_of(const Strip& strip, int64_t row, int64_t kv_head) const {
    return kv_head * plan.group + (strip.first_row + row) % plan.group;
  }
  template <typename T>
  const T* query(const Strip& strip, int64_t row, int64_t kv_head) const {
    return static_cast<const T*>(queries) + row_of(strip, row) * row_stride +
           head_of(strip, row, kv_head) * cache.head_dim;
  }
  template <typename T>
  T* output_row(const Strip& strip, int64_t row, int64_t kv_head) const {
    const int64_t num_heads = cache.num_kv_heads * plan.group;
    return static_cast<T*>(output) +
           (row_of(strip, row) * num_heads + head_of(strip, row, kv_head)) * cache.head_dim;
  }
};

// The tokens that are packed at once.
template <typename S>
struct Tile {
  int num_tokens;
  int num_missing;         // the first of them, which nobody sees
  const S* slots[kTokens];  // where each token's key lies; a missing one's, where some other's does

  // Looks up the tokens from `start` to the next tile's start, those outside the job's left out.
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

// Adds what a row collected of one part, or of several, to what it collected before (of nothing, its total is 0 and its
// sums may be anything). Never inlined: one function gives the same bits wherever it is called.
__attribute__((noinline)) void join(const float* sums, float largest, float total, int head_dim, float* sums_before,
                                    float& largest_before, float& total_before) {
  if (total == 0.0f) return;
  if (total_before == 0.0f) {
    std::memcpy(sums_before, sums, head_dim * sizeof(float));
    largest_before = largest;
    total_before = total;
    return;
  }
  const float highest = largest > largest_before ? largest : largest_before;
  const float factor = exponential(splat(largest - highest))[0];
  const float factor_before = exponential(splat(largest_before - highest))[0];
  largest_before = highest;
  total_before = total_before * factor_before + total * factor;
  for (int dim = 0; dim < head_dim; ++dim) sums_before[dim] = sums_before[dim] * factor_before + sums[dim] * factor;
}

void Collected::join(const Collected& next, int num_rows, int head_dim) {
  for (int row = 0; row < num_rows; ++row)
    ::join(next.sums + row * kMaxDim, next.largest[row], next.total[row], head_dim, sums + row * kMaxDim, largest[row],
           total[row]);
}

// Lays the rows of a job's strips one behind the other.
template <typename T, typename Steps>
void gather(const Layer& layer, const Job& job, int64_t kv_head, Scratch<Steps>& scratch) {
  const int head_dim = int(layer.cache.head_dim);
  int row = 0;
  for (int64_t piece = job.first_piece; piece < job.first_piece + job.num_pieces; ++piece) {
    const Strip& strip = layer.plan.strips[layer.plan.pieces[piece].strip];
    const int64_t to_position = layer.rows.context_lens[strip.seq] - layer.rows.row_starts[strip.seq + 1];
    for (int64_t of_strip = 0; of_strip < strip.num_rows; ++of_strip, ++row) {
      const T* from = layer.query<T>(strip, of_strip, kv_head);
      for (int dim = 0; dim < head_dim; ++dim) narrow(scratch.queries + row * head_dim + dim, widen(from[dim]));
      scratch.positions[row] = to_position + layer.row_of(strip, of_strip);
    }
  }
  scratch.num_rows = row;
}

// Computes a job for one KV head; what its rows collect is left in `scratch`, at the address returned. Rows are of the
// type T, slots of S: the same, or int8 with scales.
template <typename Steps, typename T, typename S>
const Collected& attend(const Layer& layer, const Job& job, int64_t kv_head, Scratch<Steps>& scratch) {
  static constexpr S kNothing[kMaxDim]{};
  const Cache& cache = layer.cache;
  const AttentionPlan& plan = layer.plan;
  const int head_dim = int(cache.head_dim);
  const int64_t seq = plan.strips[plan.pieces[job.first_piece].strip].seq;
  const int64_t* table = layer.rows.block_ids + layer.rows.block_starts[seq];
  // What a token's column is must not depend on where a row of another position begins to see.
  int64_t start = plan.is_deterministic ? job.begin / kTokens * kTokens : job.begin;
  Tile<S> tile, next;
  next.find(layer, kv_head, job, table, start);
  // Behind an int8 vector lies its scale.
  constexpr int scale_bytes = std::is_same_v<S, int8_t> ? int(sizeof(float)) : 0;
  for (int token = next.num_missing; token < next.num_tokens; ++token)
    for (int dim = 0; dim < head_dim + scale_bytes; dim += int(64 / sizeof(S))) fetch(next.slots[token] + dim);
  gather<T>(layer, job, kv_head, scratch);
  const int num_rows = scratch.num_rows;
  // Elsewhere a chunk of a prompt walks through its context in one go.
  const bool has_parts = plan.is_deterministic && job.begin / kPartTokens != (job.end - 1) / kPartTokens;
  Collected &part = scratch.part, &before = scratch.before;
  part.clear(num_rows, head_dim);
  if (has_parts) before.clear(num_rows, head_dim);
  const bool is_few = !plan.is_deterministic && num_rows <= kFewRows && head_dim % (2 * kLanes) == 0;
  const int64_t to_values = cache.num_kv_heads * cache.block_size * cache.slot_bytes / int64_t(sizeof(S));
  const Scales* scales = nullptr;
  for (int64_t next_start; start < job.end; start = next_start) {
    tile = next;
    next_start = (start / kTokens + 1) * kTokens;
    next.find(layer, kv_head, job, table, next_start);
    const int num_tokens = tile.num_tokens;
    const auto clamp = [&](int64_t token) { return int(token < 0 ? 0 : token < num_tokens ? token : num_tokens); };
    if (is_few) {
      with_few(num_rows, [&](auto few) {
        score<Steps, few.value>(scratch.queries, tile.slots, to_values, num_tokens, head_dim, scratch.scores, kTokens);
      });
    } else {
      pack_columns<Steps, S>(tile.slots, to_values, num_tokens, head_dim, scratch.keys);
      multiply<Steps>(scratch.queries, head_dim, scratch.keys, head_dim / Steps::kValues, scratch.scores, kTokens,
                      nullptr, num_rows, num_tokens);
    }
    if constexpr (std::is_same_v<S, int8_t>) {
      scratch.scales.read(tile.slots, to_values, num_tokens, head_dim);
      for (int token = 0; token < tile.num_missing; ++token) scratch.scales.values[token] = 0.0f;
      scales = &scratch.scales;
    }
    for (int row = 0; row < num_rows; ++row) {
      const int64_t position = scratch.positions[row];
      scratch.rescale[row] = weigh(scratch.scores + row * kTokens, clamp(plan.sight.first_seen(position) - start),
                                   clamp(position + 1 - start), num_tokens, layer.scale, scales,
                                   scratch.weights + row * kTokens, part.largest[row], part.total[row]);
    }
    for (int token = 0; token < num_tokens; ++token)
      tile.slots[token] = token < tile.num_missing ? kNothing : tile.slots[token] + to_values;
    if (is_few) {
      with_few(num_rows, [&](auto few) {
        add_values<Steps, few.value>(scratch.weights, kTokens, tile.slots, next.slots, num_tokens, next.num_tokens,
                                     head_dim, part.sums, kMaxDim, scratch.rescale);
      });
    } else {
      pack_values<Steps, S>(tile.slots, next.slots, num_tokens, next.num_tokens, head_dim, scratch.values);
      multiply<Steps>(scratch.weights, kTokens, scratch.values, (num_tokens + Steps::kValues - 1) / Steps::kValues,
                      part.sums, kMaxDim, scratch.rescale, num_rows, head_dim);
    }
    if (has_parts && (next_start % kPartTokens == 0 || next_start >= job.end)) {
      before.join(part, num_rows, head_dim);
      part.clear(num_rows, head_dim);
    }
  }
  return has_parts ? before : part;
}

template <typename T>
void store_scaled(T* to, const float* from, int count, float factor) {
  int idx = 0;
  for (; idx + kLanes <= count; idx += kLanes) store(to + idx, load(from + idx) * factor);
  for (; idx < count; ++idx) narrow(to + idx, from[idx] * factor);
}

// Finishes the rows of a job, or keeps what they have collected until all pieces are there.
template <typename T>
void put(const Layer& layer, const Job& job, int64_t kv_head, const Collected& whole) {
  AttentionPlan& plan = layer.plan;
  const int head_dim = int(layer.cache.head_dim);
  int row = 0;
  for (int64_t idx = job.first_piece; idx < job.first_piece + job.num_pieces; ++idx) {
    const Strip& strip = plan.strips[plan.pieces[idx].strip];
    int64_t slot = kv_head * plan.num_slots + plan.pieces[idx].slot(plan.strips);
    for (int64_t of_strip = 0; of_strip < strip.num_rows; ++of_strip, ++row, ++slot) {
      const float* sums = whole.sums + row * kMaxDim;
      if (strip.num_pieces == 0) {
        store_scaled(layer.output_row<T>(strip, of_strip, kv_head), sums, head_dim, 1.0f / whole.total[row]);
      } else {
        std::memcpy(&plan.sums[slot * head_dim], sums, head_dim * sizeof(float));
        plan.largest[slot] = whole.largest[row];
        plan.total[slot] = whole.total[row];
      }
    }
  }
}

// Joins the pieces of a strip.
template <typename T>
void merge(const Layer& layer, const Strip& strip, int64_t kv_head) {
  const AttentionPlan& plan = layer.plan;
  const int head_dim = int(layer.cache.head_dim);
  alignas(64) float sums[kMaxDim];
  for (int64_t row = 0; row < strip.num_rows; ++row) {
    float largest = -kInfinity, total = 0.0f;
    int64_t slot = kv_head * plan.num_slots + strip.first_slot + row;
    for (int64_t piece = 0; piece < strip.num_pieces; ++piece, slot += strip.num_rows)
      join(&plan.sums[slot * head_dim], plan.largest[slot], plan.total[slot], head_dim, sums, largest, total);
    store_scaled(layer.output_row<T>(strip, row, kv_head), sums, head_dim, 1.0f / total);
  }
}

template <typename T, typename S>
void attend_all(const Layer& layer) {
  using Steps = typename StepsOf<T>::Type;
  const AttentionPlan& plan = layer.plan;
  const int64_t num_heads = layer.cache.num_kv_heads;
  quire::in_turns(int64_t(plan.jobs.size()) * num_heads, [&](int64_t idx) {
    thread_local std::unique_ptr<Scratch<Steps>> scratch(new Scratch<Steps>);
    plan.at(idx, num_heads, [&](const Job& job, int64_t kv_head) {
      put<T>(layer, job, kv_head, attend<Steps, T, S>(layer, job, kv_head, *scratch));
    });
  });
  if (plan.num_slots == 0) return;
  quire::in_parallel(int64_t(plan.strips.size()) * num_heads, 16, [&](int64_t begin, int64_t end) {
    for (int64_t idx = begin; idx < end; ++idx) {
      const Strip& strip = plan.strips[idx / num_heads];
      if (strip.num_pieces > 0) merge<T>(layer, strip, idx % num_heads);
    }
  });
}

}  // namespace

// Lets each row of a step see its sequence up to itself, as far back as the plan says. The cache's heads are of at most
// 256 values, an even number, and as many query heads as the plan is for share one of its heads.
QUIRE_EXPORT void quire_attend(const StepRows* rows, const Cache* cache, AttentionPlan* plan, int64_t layer,
                               const void* queries, int64_t row_stride, float scale, void* output) {
  with_type(cache->type, [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    const Layer of_step{*rows, *cache, *plan, layer, queries, row_stride, scale, output};
    (cache->is_quantised ? attend_all<T, int8_t> : attend_all<T, T>)(of_step);
  });
}
