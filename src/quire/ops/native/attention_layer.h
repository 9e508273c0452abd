// Queries, outputs and sinks of a layer, for all jobs of its attention.
#pragma once

#include <cmath>

#include "attention_plan.h"
#include "cache.h"
#include "tiles.h"

namespace {

using quire::AttentionPlan;
using quire::QueryTile;

constexpr float kExponents = 1.44269504088896341f;  // log2(e): weights are powers of e, computed as powers of two

// Queries and outputs of a layer, and the arguments that all its jobs share.
struct Layer {
  const StepRows& rows;
  const Cache& cache;
  AttentionPlan& plan;
  int64_t idx;
  const void* queries;  // [rows, heads, head dim]
  int64_t row_stride;
  float scale;         // factor that turns scores into exponents of two
  SoftCap cap;
  const float* sinks;  // [heads], or null: a logit of each head that takes weight in the softmax, and has no value
  void* output;        // [rows, heads, head dim], contiguous

  // Returns the row of the step for a row of a query tile.
  int64_t row_of(const QueryTile& query_tile, int64_t row) const {
    return rows.row_starts[query_tile.seq] + (query_tile.first_row + row) / plan.group;
  }
  // Returns the query head for a row of a query tile.
  int64_t head_of(const QueryTile& query_tile, int64_t row, int64_t kv_head) const {
    return kv_head * plan.group + (query_tile.first_row + row) % plan.group;
  }
  template <typename T>
  const T* query(const QueryTile& query_tile, int64_t row, int64_t kv_head) const {
    return static_cast<const T*>(queries) + row_of(query_tile, row) * row_stride +
           head_of(query_tile, row, kv_head) * cache.head_dim;
  }
  template <typename T>
  T* output_row(const QueryTile& query_tile, int64_t row, int64_t kv_head) const {
    const int64_t num_heads = cache.num_kv_heads * plan.group;
    return static_cast<T*>(output) +
           (row_of(query_tile, row) * num_heads + head_of(query_tile, row, kv_head)) * cache.head_dim;
  }

  // Returns the weight of the sink of a row's head, relative to the row's largest score. Each row's sums are complete
  // only once: where they are divided by the total, this weight is added to it, and no partial result contains it.
  float sink_weight(const QueryTile& query_tile, int64_t row, int64_t kv_head, float largest) const {
    if (sinks == nullptr) return 0.0f;
    return std::exp2(sinks[head_of(query_tile, row, kv_head)] * kExponents - largest);
  }
};

}  // namespace
