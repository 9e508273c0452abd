// Attention that reads keys and values directly from the blocks of the cache, for any mixture of single rows (decode),
// few rows (verified drafts) and chunks of prompts.
//
// The query rows of one KV head (all query heads of its group, for tokens of one sequence or of several that share
// blocks) are computed against one tile of keys and values at a time, which stays in the CPU's cache meanwhile: see
// attention_task.h. (Block tables: PagedAttention, arXiv 2309.06180.)
//
// Under a deterministic plan the bits of a row's result do not depend on other rows, of its sequence or of others:
// tiles and parts begin at multiples of their lengths, partial results are merged from front to back whichever thread
// computed them, and all jobs take code paths that give the same bits. Under other plans a row's bits depend on the
// number of rows of its job, on the blocks that its sequence shares, and on the numbers of tokens and threads, which
// determine how contexts are cut into parts.
#include "attention_task.h"

#include <memory>

#include "parallel.h"

namespace {

template <typename T>
void store_scaled(T* to, const float* from, int count, float factor) {
  int idx = 0;
  for (; idx + kLanes <= count; idx += kLanes) store(to + idx, load(from + idx) * factor);
  for (; idx < count; ++idx) narrow(to + idx, from[idx] * factor);
}

// Writes the output of a job's rows, or stores their partial results until all splits of their query tile are computed.
template <typename T>
void store_result(const Layer& layer, const Job& job, int64_t kv_head, const PartialSoftmax& result) {
  AttentionPlan& plan = layer.plan;
  const int head_dim = int(layer.cache.head_dim);
  int row = 0;
  for (int64_t idx = job.first_split; idx < job.first_split + job.num_splits; ++idx) {
    const QueryTile& query_tile = plan.query_tiles[plan.splits[idx].query_tile];
    int64_t slot = kv_head * plan.num_slots + plan.splits[idx].slot(plan.query_tiles);
    for (int64_t tile_row = 0; tile_row < query_tile.num_rows; ++tile_row, ++row, ++slot) {
      const float* sums = result.sums + row * kMaxDim;
      if (query_tile.num_splits == 0) {
        const float total = result.total[row] + layer.sink_weight(query_tile, tile_row, kv_head, result.largest[row]);
        store_scaled(layer.output_row<T>(query_tile, tile_row, kv_head), sums, head_dim, 1.0f / total);
      } else {
        std::memcpy(&plan.sums[slot * head_dim], sums, head_dim * sizeof(float));
        plan.largest[slot] = result.largest[row];
        plan.total[slot] = result.total[row];
      }
    }
  }
}

// Merges the partial results of a query tile's splits.
template <typename T>
void merge_splits(const Layer& layer, const QueryTile& query_tile, int64_t kv_head) {
  const AttentionPlan& plan = layer.plan;
  const int head_dim = int(layer.cache.head_dim);
  alignas(64) float sums[kMaxDim];
  for (int64_t row = 0; row < query_tile.num_rows; ++row) {
    float largest = -kInfinity, total = 0.0f;
    int64_t slot = kv_head * plan.num_slots + query_tile.first_slot + row;
    for (int64_t split = 0; split < query_tile.num_splits; ++split, slot += query_tile.num_rows)
      merge_partial(&plan.sums[slot * head_dim], plan.largest[slot], plan.total[slot], head_dim, sums, largest, total);
    total += layer.sink_weight(query_tile, row, kv_head, largest);
    store_scaled(layer.output_row<T>(query_tile, row, kv_head), sums, head_dim, 1.0f / total);
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
      store_result<T>(layer, job, kv_head, AttentionTask<Steps, T, S>(layer, job, kv_head, *scratch).run());
    });
  });
  if (plan.num_slots == 0) return;
  quire::in_parallel(int64_t(plan.query_tiles.size()) * num_heads, 16, [&](int64_t begin, int64_t end) {
    for (int64_t idx = begin; idx < end; ++idx) {
      const QueryTile& query_tile = plan.query_tiles[idx / num_heads];
      if (query_tile.num_splits > 0) merge_splits<T>(layer, query_tile, idx % num_heads);
    }
  });
}

}  // namespace

// Computes attention for all rows of a step: each row attends to its sequence up to its own position, within the plan's
// mask range. The cache's head dimension is even and at most 256, and `plan->group` query heads share one KV head.
// Scores are multiplied by `scale`; those of a `soft_cap` above 0 become soft_cap * tanh(score / soft_cap). `sinks` is
// null, or has a logit of each head that takes weight in the softmax.
QUIRE_EXPORT void quire_attend(const StepRows* rows, const Cache* cache, AttentionPlan* plan, int64_t layer,
                               const void* queries, int64_t row_stride, float scale, float soft_cap, const float* sinks,
                               void* output) {
  with_type(cache->type, [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    const SoftCap cap{soft_cap / scale};
    const Layer of_step{*rows, *cache, *plan, layer, queries, row_stride, scale * kExponents, cap, sinks, output};
    (cache->is_quantised ? attend_all<T, int8_t> : attend_all<T, T>)(of_step);
  });
}
