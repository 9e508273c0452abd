// Attention read straight from block tables, for any mixture of single rows (decode), few rows (verified drafts) and
// chunks of prompts.
//
// The query rows of one KV head (all heads of its group, for some tokens of one sequence, or of several that share
// blocks) meet a tile of keys and values at a time, which stays in the CPU's cache meanwhile: see attending.h. (Block
// tables: PagedAttention, arXiv 2309.06180.)
//
// Under a deterministic plan a row gets the same bits whatever rows are beside it, in its sequence or in others: tiles
// and parts begin at multiples of their lengths, parts are joined from front to back, whoever computed them, and all
// jobs take paths that give the same bits. Under others a row's bits depend on how many rows its job has, on what its
// sequence shares, and on how many tokens and threads there are, by which parts are cut.
#include "attending.h"

#include <memory>

#include "parallel.h"

namespace {

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
      put<T>(layer, job, kv_head, Attending<Steps, T, S>(layer, job, kv_head, *scratch).run());
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
    const Layer of_step{*rows, *cache, *plan, layer, queries, row_stride, scale * kExponents, output};
    (cache->is_quantised ? attend_all<T, int8_t> : attend_all<T, T>)(of_step);
  });
}
