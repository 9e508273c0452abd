// Attention of many query rows over a tile of keys and values. The rows are packed side by side into panels, one lane
// each; keys are multiplied in place, one after the other, and the softmax processes all lanes at once.
//
// A row gets the same bits as from `multiply` and `weigh`: its sums are the same, in the same order.
#pragma once

#include <algorithm>

#include "tiles.h"

namespace {

// Tokens of a tile that rows of a panel see, in whole vectors except at the tile's end.
struct Span {
  int begin;
  int end;  // scores past the last token have no weight

  bool is_empty() const { return begin >= end; }
};

// Calls `body` with the number of vectors for `count` lanes as a constant, at most a panel's.
template <int kVectors = kTileVectors, typename Body>
QUIRE_INLINE void with_vectors(int count, Body body) {
  if constexpr (kVectors > 1) {
    if (count <= (kVectors - 1) * kLanes) return with_vectors<kVectors - 1>(count, body);
  }
  body(std::integral_constant<int, kVectors>());
}

// Widens vectors to the type that is multiplied; vectors of that type are not copied.
//
// widened, places: values [count, width] and address of each widened vector. Returns the address of each vector.
template <typename Steps, typename T>
const typename Steps::Value* const* widen_vectors(const T* const* vectors, int count, int width,
                                                  typename Steps::Value* widened,
                                                  const typename Steps::Value** places) {
  using Value = typename Steps::Value;
  if constexpr (std::is_same_v<T, Value>) {
    return vectors;
  } else {
    constexpr int unit = kLanes * Steps::kValues;
    for (int idx = 0; idx < count; ++idx, widened += width) {
      int dim = 0;
      for (; dim + unit <= width; dim += unit) store_bits(widened + dim, load_steps<Steps>(vectors[idx] + dim));
      for (; dim < width; ++dim) narrow(widened + dim, widen(vectors[idx][dim]));
      places[idx] = widened;
    }
    return places;
  }
}

// Prefetches vectors of the cache, a few at a time: requests that arrive faster than memory answers delay the products.
template <typename T>
class VectorPrefetch {
 public:
  // vectors: addresses, `ahead` values before the prefetched data. width: number of values, a scale included.
  // num_calls: minimum number of calls of `step`.
  VectorPrefetch(const T* const* vectors, int64_t ahead, int count, int width, int num_calls)
      : vectors_(vectors), ahead_(ahead), count_(count), width_(width), each_((count + num_calls - 1) / num_calls) {}

  void step() {
    for (const int end = std::min(count_, idx_ + each_); idx_ < end; ++idx_)
      for (int dim = 0; dim < width_; dim += int(64 / sizeof(T))) fetch(vectors_[idx_] + ahead_ + dim);
  }

 private:
  const T* const* vectors_;
  const int64_t ahead_;
  const int count_, width_, each_;
  int idx_ = 0;
};

// Computes the scores of a panel's rows: scores[token, row] = key(token) . query(row).
//
// prefetch: data that is prefetched meanwhile.
template <typename Steps, typename T>
void score_panel(const typename Steps::Value* const* keys, Span tokens, const typename Steps::Value* queries,
                 int num_rows, int depth, float* scores, VectorPrefetch<T>& prefetch) {
  with_vectors(num_rows, [&](auto vectors) {
    in_tiles<kTileRows>(tokens.end - tokens.begin, [&](int idx, auto count) {
      const int token = tokens.begin + idx;
      GatheredRows<Steps, count.value> rows;
      for (int beside = 0; beside < count.value; ++beside) rows.rows[beside] = keys[token + beside];
      prefetch.step();
      multiply_tile<Steps, count.value, vectors.value>(rows, PanelSteps<Steps>{queries}, depth, scores + token * kPanel,
                                                       kPanel, nullptr);
    });
  });
}

// State of the softmax of a vector of rows, and the range of the tile's tokens that each row sees.
struct Lanes {
  Floats largest;  // largest score
  Floats total;    // sum of the weights relative to it
  Floats rescale;  // factor of the rows' previous sums
  Ints first;      // first token of the tile that a row sees
  Ints last;       // end of the tokens that a row sees
};

// `weigh` for a vector of rows: turns scores into weights.
//
// scores: [tokens, kPanel]. weights: steps of tokens by kPanel rows.
// scales: scales of quantised keys and values, or null.
template <typename Steps>
void weigh_lanes(float* scores, Span tokens, float scale, SoftCap cap, const Scales* scales,
                 typename Steps::Value* weights, bool sees_all, Lanes& lanes) {
  using Value = typename Steps::Value;
  if (scales || cap || !sees_all) {
    for (int token = tokens.begin; token < tokens.end; ++token) {
      Floats score = load(scores + token * kPanel);
      if (scales) score *= scales->keys[token];
      if (cap) score = cap(score);
      const Ints here = Ints{} + token;
      store(scores + token * kPanel, (here >= lanes.first) & (here < lanes.last) ? score : splat(-kInfinity));
    }
  }
  Floats highest[4];
  for (Floats& value : highest) value = splat(-kInfinity);
  for (int token = tokens.begin; token < tokens.end; token += 4) {
#pragma GCC unroll 4
    for (int idx = 0; idx < 4; ++idx) highest[idx] = max(highest[idx], load(scores + (token + idx) * kPanel));
  }
  const Floats before = lanes.largest;
  const Floats here = max(max(highest[0], highest[1]), max(highest[2], highest[3])) * scale;
  lanes.largest = here > before ? here : before;
  // While a row has seen no token, all its scores are minus infinity.
  const Floats largest = lanes.largest == -kInfinity ? Floats{} : lanes.largest;
  Floats sums[kLanes]{};  // as in `weigh`
  for (int chunk = tokens.begin; chunk < tokens.end; chunk += kLanes) {
#pragma GCC unroll 16
    for (int idx = 0; idx < kLanes; idx += Steps::kValues) {
      Floats step[Steps::kValues];
#pragma GCC unroll 2
      for (int value = 0; value < Steps::kValues; ++value) {
        const int token = chunk + idx + value;
        step[value] = weight_of<Value>(load(scores + token * kPanel), scale, largest);
        sums[idx + value] += step[value];
        if (scales) step[value] *= scales->values[token];
      }
      Steps::store_step(weights + (chunk + idx) * kPanel, step);
    }
  }
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int idx = 0; idx < half; ++idx) sums[idx] += sums[idx + half];
  lanes.rescale = before == -kInfinity ? Floats{} : power_of_two<false>(before - largest);
  lanes.total = lanes.total * lanes.rescale + sums[0];
}

// Adds a panel's weighted values: sums[row] = rescale[row] * sums[row] + weights[token, row] * value(token).
//
// weights, values: data from the first of `depth` steps on; values are one panel of dimensions, `num_dims` of them.
// prefetch: data that is prefetched meanwhile.
template <typename Steps, typename T>
void add_panel(const typename Steps::Value* weights, int num_rows, const typename Steps::Value* values, int depth,
               int num_dims, float* sums, int sums_stride, const float* rescale, VectorPrefetch<T>& prefetch) {
  with_vectors(num_dims, [&](auto vectors) {
    in_tiles<kTileRows>(num_rows, [&](int row, auto count) {
      const ContiguousRows<Steps> rows{weights + row * Steps::kValues, kPanel * Steps::kValues};
      prefetch.step();
      multiply_tile<Steps, count.value, vectors.value>(rows, PanelSteps<Steps>{values}, depth, sums + row * sums_stride,
                                                       sums_stride, rescale + row);
    });
  });
}

}  // namespace
