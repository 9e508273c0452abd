// Operations on a tile of keys and values: scores, weights and weighted sums.
//
// Packing a tile into panels for `multiply` pays off for many query rows only.
#pragma once

#include "decode_rows.h"

namespace {

constexpr int kTileTokens = 128;  // number of tokens of a tile

// Scales of the int8 keys and values of a tile.
struct Scales {
  alignas(64) float keys[kTileTokens];
  alignas(64) float values[kTileTokens];

  // Reads the scales after vectors that are `ahead` values after each given one. Past the tokens, scales are 0.
  static void read(const int8_t* const* vectors, int64_t ahead, int num_tokens, int head_dim, float* scales) {
    for (int token = 0; token < num_tokens; ++token)
      scales[token] = load_bits<float>(vectors[token] + ahead + head_dim);
    for (int token = num_tokens; token < round_up(num_tokens, kLanes); ++token) scales[token] = 0.0f;
  }
};

// Stores two values as a pair of bfloat16.
template <typename T>
QUIRE_INLINE void store_pair(BFloat16* to, T first, T second) {
  narrow(to, widen(first));
  narrow(to + 1, widen(second));
}

// Packs vectors of `width` values, such as keys: a column for each vector, a row of the panel for each step.
//
// vectors: their addresses. The data that is read next lies `ahead` values after each, and is prefetched.
template <typename Steps, typename T>
void pack_columns(const T* const* vectors, int64_t ahead, int count, int width, typename Steps::Value* panels) {
  constexpr int values = Steps::kValues;
  const int depth = width / values;
  for (int column = 0; column < count; column += kLanes) {
    const T* lanes[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {  // past the end the last vector is repeated; its sums are not read
      lanes[lane] = vectors[column + lane < count ? column + lane : count - 1];
      if constexpr (std::is_same_v<T, int8_t>) fetch(lanes[lane] + width + ahead);  // the scale
    }
    auto* panel = panels + (column / kPanel * kPanel * depth + column % kPanel) * values;
    int step = 0;
    for (; step + kLanes <= depth; step += kLanes) {
      Words square[kLanes];
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes; ++lane) {
        square[lane] = load_steps<Steps>(lanes[lane] + step * values);
        if (starts_line<T>(step * values)) fetch(lanes[lane] + step * values + ahead);
      }
      transpose(square);
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes; ++lane) store_bits(panel + (step + lane) * kPanel * values, square[lane]);
    }
    for (; step < depth; ++step)
      for (int lane = 0; lane < kLanes; ++lane)
        for (int value = 0; value < values; ++value)
          narrow(panel + (step * kPanel + lane) * values + value, widen(lanes[lane][step * values + value]));
  }
}

// Packs values: a column for each dimension, a row of the panel for each token or pair of tokens.
//
// rows: address of each token's value. next: address of each token of the next tile, which is prefetched.
template <typename Steps, typename T>
void pack_values(const T* const* rows, const T* const* next, int num_tokens, int num_next, int head_dim,
                 typename Steps::Value* panels) {
  const int depth = (num_tokens + Steps::kValues - 1) / Steps::kValues;
  const auto place = [&](int step, int dim) {
    return panels + (dim / kPanel * kPanel * depth + step * kPanel + dim % kPanel) * Steps::kValues;
  };
  for (int step = 0; step < depth; ++step) {
    for (int token = step * Steps::kValues; token < (step + 1) * Steps::kValues && token < num_next; ++token) {
      for (int dim = 0; dim < head_dim; dim += int(64 / sizeof(T))) fetch(next[token] + dim);
      if constexpr (std::is_same_v<T, int8_t>) fetch(next[token] + head_dim);  // the scale
    }
    int dim = 0;
    if constexpr (Steps::kValues == 2) {
      const T* first = rows[2 * step];
      if (2 * step + 1 < num_tokens) {
        const T* second = rows[2 * step + 1];
        for (; dim + 2 * kLanes <= head_dim; dim += 2 * kLanes) {
          const auto pairs = interleave(load_halves(first + dim), load_halves(second + dim));
          store_bits(place(step, dim), pairs.low);
          store_bits(place(step, dim + kLanes), pairs.high);
        }
        for (; dim < head_dim; ++dim) store_pair(place(step, dim), first[dim], second[dim]);
      } else {
        // The half without a token must be zero: its weight is, but zero times infinity is not zero.
        for (; dim < head_dim; ++dim) store_pair(place(step, dim), first[dim], T{});
      }
    } else {
      const T* row = rows[step];
      for (; dim + kLanes <= head_dim; dim += kLanes) store(place(step, dim), load(row + dim));
      for (; dim < head_dim; ++dim) *place(step, dim) = widen(row[dim]);
    }
  }
}

// Returns the weight of a score relative to the largest one: 2^(score * scale - largest), in the precision of the
// weights.
template <typename Value>
QUIRE_INLINE Floats weight_of(Floats score, float scale, Floats largest) {
  return power_of_two<std::is_same_v<Value, BFloat16>>(score * scale - largest);
}

// A soft cap of scores: limit * tanh(score / limit), both before they are multiplied by their scale.
struct SoftCap {
  float limit;  // 0 for none

  explicit operator bool() const { return limit != 0.0f; }

  QUIRE_INLINE Floats operator()(Floats score) const {
    const Floats x = score * (1.0f / limit), square = x * x;
    // tanh(x) = 1 - 2 / (e^2x + 1). A larger exponent changes nothing any more, and is no power; a NaN stays one.
    const Floats exponent = x * 2.88539008177792681f, most = splat(126.0f);
    const Floats large = 1.0f - splat(2.0f) / (power_of_two<false>(most < exponent ? most : exponent) + 1.0f);
    // Its first terms, where that would lose what is small beside 1.
    Floats small = square * splat(62.0f / 2835.0f) - 17.0f / 315.0f;
    small = small * square + 2.0f / 15.0f;
    small = small * square - 1.0f / 3.0f;
    small = small * square * x + x;
    return limit * (square < 0.0625f ? small : large);
  }
};

// Turns a row of scores into weights relative to the row's largest score so far; columns outside [begin, end) get no
// weight. Returns the factor of the row's previous sums.
//
// scale: factor that turns scores into exponents of two.
// scales: scales of quantised keys, which multiply scores, and values, which multiply weights; or null.
template <typename Value>
QUIRE_INLINE float weigh(float* scores, int begin, int end, int num_columns, float scale, SoftCap cap,
                         const Scales* scales, Value* weights, float& largest, float& total) {
  const int width = round_up(num_columns, kLanes);
  if (begin >= end) {
    std::memset(static_cast<void*>(weights), 0, width * sizeof(Value));
    return 1.0f;
  }
  if (scales) {
    for (int column = 0; column < width; column += kLanes)
      store(scores + column, load(scores + column) * load(scales->keys + column));
  }
  if (cap)
    for (int column = 0; column < width; column += kLanes) store(scores + column, cap(load(scores + column)));
  for (int column = 0; column < begin; ++column) scores[column] = -kInfinity;
  for (int column = end; column < width; ++column) scores[column] = -kInfinity;
  Floats highest = load(scores);
  for (int column = kLanes; column < width; column += kLanes) highest = max(highest, load(scores + column));
  const float before = largest;
  const float here = max_of(highest)[0] * scale;
  largest = here > before ? here : before;
  Floats sum{};
  for (int column = 0; column < width; column += kLanes) {
    const Floats weight = weight_of<Value>(load(scores + column), scale, splat(largest));
    sum += weight;
    store(weights + column, scales ? weight * load(scales->values + column) : weight);
  }
  const float rescale = before == -kInfinity ? 0.0f : power_of_two<false>(splat(before - largest))[0];
  total = total * rescale + sum_of(sum)[0];
  return rescale;
}

}  // namespace
