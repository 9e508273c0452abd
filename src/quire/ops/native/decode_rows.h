// Products of few rows with the keys and values of a tile, which are read in place: packing them would take longer.
#pragma once

#include "int8_kv_attention.h"
#include "gemm.h"

namespace {

constexpr int kFewRows = 4;

// Computes the scores of few rows: scores[row, token] = queries[row] . key(token).
//
// keys: address of each token's key. The data that is read next lies `ahead` values after each, and is prefetched.
template <typename Steps, int kRows, typename T>
void score(const typename Steps::Value* queries, const T* const* keys, int64_t ahead, int num_tokens, int head_dim,
           float* scores, int stride) {
  constexpr int width = kLanes * Steps::kValues;
  constexpr int side = kRows * 8 <= kRegisters ? 4 : 2;  // tokens at a time, for which a query is loaded once
  for (int column = 0; column < num_tokens; column += kLanes) {
    Floats sums[kRows][kLanes / side];
    for (int part = 0; part < kLanes / side; ++part) {
      const T* beside[side];
      for (int token = 0; token < side; ++token) {  // past the end the last key is repeated; its score is not read
        const int idx = column + part * side + token;
        beside[token] = keys[idx < num_tokens ? idx : num_tokens - 1];
        fetch_again(keys, idx, num_tokens, head_dim);
        if constexpr (std::is_same_v<T, int8_t>) fetch(beside[token] + head_dim + ahead);  // the scale
      }
      Floats products[kRows][side]{};
      for (int dim = 0; dim < head_dim; dim += width) {
        Floats values[side];
#pragma GCC unroll 4
        for (int token = 0; token < side; ++token) {
          values[token] = bit_cast<Floats>(load_steps<Steps>(beside[token] + dim));
          if (starts_line<T>(dim)) fetch(beside[token] + dim + ahead);
        }
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          const Floats query = load_bits<Floats>(queries + row * head_dim + dim);
#pragma GCC unroll 4
          for (int token = 0; token < side; ++token) Steps::multiply_add(products[row][token], values[token], query);
        }
      }
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) sums[row][part] = sums_of<side, 1>(products[row]);
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row)
      store(scores + row * stride + column, sums_of<kLanes / side, side>(sums[row]));
  }
}

// Adds values to the sums of few rows: sums[row] = rescale[row] * sums[row] + weights[row, token] * value(token).
//
// Covers the dimensions of `kVectors` vectors from `first_dim` on.
template <typename Steps, int kRows, int kVectors, typename T>
void add_columns(const typename Steps::Value* weights, int stride, const T* const* values, const T* const* next,
                 int num_tokens, int num_next, [[maybe_unused]] int head_dim, int first_dim, float* sums,
                 int sums_stride, const float* rescale) {
  Floats totals[kRows][kVectors];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector)
      totals[row][vector] = load(sums + row * sums_stride + first_dim + vector * kLanes) * rescale[row];
  for (int token = 0; token < num_tokens; token += Steps::kValues) {
    for (int ahead = token; ahead < token + Steps::kValues && ahead < num_next; ++ahead) {
#pragma GCC unroll 8
      for (int dim = 0; dim < kVectors * kLanes; dim += int(64 / sizeof(T))) fetch(next[ahead] + first_dim + dim);
      if constexpr (std::is_same_v<T, int8_t>)
        if (first_dim == 0) fetch(next[ahead] + head_dim);  // the scale
    }
    Floats columns[kVectors];
    if constexpr (Steps::kValues == 2) {
      const bool is_pair = token + 1 < num_tokens;
#pragma GCC unroll 8
      for (int vector = 0; vector < kVectors; vector += 2) {
        const T* first = values[token] + first_dim + vector * kLanes;
        // The half of a pair without a token must be zero: its weight is, but zero times infinity is not zero.
        const HalfPairs second = is_pair ? load_halves(values[token + 1] + first_dim + vector * kLanes) : HalfPairs{};
        const Interleaved pairs = interleave(load_halves(first), second);
        columns[vector] = bit_cast<Floats>(pairs.low);
        columns[vector + 1] = bit_cast<Floats>(pairs.high);
      }
    } else {
#pragma GCC unroll 8
      for (int vector = 0; vector < kVectors; ++vector)
        columns[vector] = load(values[token] + first_dim + vector * kLanes);
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const Floats weight = Steps::broadcast(weights + row * stride + token);
#pragma GCC unroll 8
      for (int vector = 0; vector < kVectors; ++vector)
        Steps::multiply_add(totals[row][vector], weight, columns[vector]);
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector)
      store(sums + row * sums_stride + first_dim + vector * kLanes, totals[row][vector]);
}

// `add_columns` for all dimensions.
//
// values: address of each token's value. next: address of each token of the next tile, which is prefetched.
template <typename Steps, int kRows, typename T, int kVectors = kRegisters / (kRows <= 2 ? 4 : 8)>
void add_values(const typename Steps::Value* weights, int stride, const T* const* values, const T* const* next,
                int num_tokens, int num_next, int head_dim, float* sums, int sums_stride, const float* rescale,
                int first_dim = 0) {
  int dim = first_dim;
  for (; dim + kVectors * kLanes <= head_dim; dim += kVectors * kLanes)
    add_columns<Steps, kRows, kVectors>(weights, stride, values, next, num_tokens, num_next, head_dim, dim, sums,
                                        sums_stride, rescale);
  if constexpr (kVectors > 2)
    add_values<Steps, kRows, T, kVectors / 2>(weights, stride, values, next, num_tokens, num_next, head_dim, sums,
                                              sums_stride, rescale, dim);
}

// Calls `body` with the number of rows as a constant.
template <typename Body>
QUIRE_INLINE void with_few(int num_rows, Body body) {
  switch (num_rows) {
    case 1: return body(std::integral_constant<int, 1>());
    case 2: return body(std::integral_constant<int, 2>());
    case 3: return body(std::integral_constant<int, 3>());
    default: return body(std::integral_constant<int, 4>());
  }
}

}  // namespace
