// Products of few bfloat16 rows with int8 keys and values, by instructions that multiply bytes.
//
// Widening the bytes would take longer than the products. Instead, a row is rounded to integers of 16 bits, in
// proportion to its largest magnitude, and each integer is split into two bytes, which are multiplied separately. The
// loss, 2^-16 of the largest magnitude, is far below a rounding to bfloat16; the sums of the products are exact.
#pragma once

#include "cache.h"
#include "gemm.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define QUIRE_HAS_BYTE_ROWS

namespace {

constexpr int kByteDims = 64;  // dimensions of a vector; heads are whole vectors
// Offset of each int8 value, because the instruction takes one unsigned factor.
constexpr int kByteOffset = 128;

// Adds the products of four unsigned and four signed bytes in each lane.
QUIRE_INLINE void multiply_bytes(Ints& sum, Ints bytes, Ints row) {
  sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes, (__m512i)row);
}

QUIRE_INLINE Ints load_bytes(const int8_t* from) { return bit_cast<Ints>(load_bits<Words>(from) ^ 0x80808080u); }

// A row of the integers 256 * high + low, in units of `scale`.
struct SplitInt16Row {
  alignas(64) int8_t high[kMaxDim];
  alignas(64) int8_t low[kMaxDim];
  float scale;
  int32_t excess;  // excess of a sum of products that the offset causes

  // from: whole vectors of values. A row with a non-finite value gives NaN.
  void read(const BFloat16* from, int count) {
    constexpr float largest = 127 * 256;
    constexpr float least = 1e-33f;  // a row without a larger value counts as zeros: nothing here is subnormal
    const float reach = largest_magnitude(from, count);
    scale = reach <= least ? 0.0f : reach / largest;
    const float factor = reach <= least ? 0.0f : largest / reach;
    Words sum{};
    for (int idx = 0; idx < count; idx += kLanes) {
      const Ints numbers = (Ints)_mm512_cvtps_epi32((__m512)(load(from + idx) * factor));
      const Ints highs = (numbers + 128) >> 8;
      store_bits(high + idx, __builtin_convertvector(highs, Bytes));
      store_bits(low + idx, __builtin_convertvector(numbers - (highs << 8), Bytes));
      sum += bit_cast<Words>(numbers);
    }
    excess = kByteOffset * int32_t(sum_of(sum)[0]);
  }

  QUIRE_INLINE Floats value(Ints sums) const { return __builtin_convertvector(sums - excess, Floats) * scale; }
};

// `score` for one row or two: the sums of more rows do not fit in registers. The scales after the keys are read on the
// way: a separate read would wait for cache lines that come with the keys.
template <int kRows>
void score_rows(const SplitInt16Row* rows, const int8_t* const* keys, int64_t ahead, int num_tokens, int head_dim,
                float* scores, int stride, float* scales) {
  constexpr int side = 4;
  for (int column = 0; column < num_tokens; column += kLanes) {
    Ints sums[kRows][kLanes / side];
    for (int part = 0; part < kLanes / side; ++part) {
      const int8_t* beside[side];
      for (int token = 0; token < side; ++token) {
        const int idx = column + part * side + token;
        beside[token] = keys[idx < num_tokens ? idx : num_tokens - 1];
        fetch(beside[token] + head_dim + ahead);  // the scale
        scales[idx] = load_bits<float>(beside[token] + head_dim);
        fetch_again(keys, idx, num_tokens, head_dim);
      }
      Ints high[kRows][side]{}, low[kRows][side]{};
      for (int dim = 0; dim < head_dim; dim += kByteDims) {
        Ints bytes[side];
#pragma GCC unroll 4
        for (int token = 0; token < side; ++token) {
          bytes[token] = load_bytes(beside[token] + dim);
          fetch(beside[token] + dim + ahead);
        }
#pragma GCC unroll 2
        for (int row = 0; row < kRows; ++row) {
          const Ints highs = load_bits<Ints>(rows[row].high + dim), lows = load_bits<Ints>(rows[row].low + dim);
#pragma GCC unroll 4
          for (int token = 0; token < side; ++token) {
            multiply_bytes(high[row][token], bytes[token], highs);
            multiply_bytes(low[row][token], bytes[token], lows);
          }
        }
      }
#pragma GCC unroll 2
      for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
        for (int token = 0; token < side; ++token) low[row][token] += high[row][token] << 8;
        sums[row][part] = sums_of<side, 1>(low[row]);
      }
    }
#pragma GCC unroll 2
    for (int row = 0; row < kRows; ++row)
      store(scores + row * stride + column, rows[row].value(sums_of<kLanes / side, side>(sums[row])));
  }
}

// Interleaves the bytes of four tokens into steps of four tokens: quarter q of vector v has the dimensions from 16 q +
// 4 v on.
QUIRE_INLINE void interleave_bytes(Ints (&bytes)[4]) {
  const __m512i low = _mm512_unpacklo_epi8((__m512i)bytes[0], (__m512i)bytes[1]);
  const __m512i high = _mm512_unpackhi_epi8((__m512i)bytes[0], (__m512i)bytes[1]);
  const __m512i next_low = _mm512_unpacklo_epi8((__m512i)bytes[2], (__m512i)bytes[3]);
  const __m512i next_high = _mm512_unpackhi_epi8((__m512i)bytes[2], (__m512i)bytes[3]);
  bytes[0] = (Ints)_mm512_unpacklo_epi16(low, next_low);
  bytes[1] = (Ints)_mm512_unpackhi_epi16(low, next_low);
  bytes[2] = (Ints)_mm512_unpacklo_epi16(high, next_high);
  bytes[3] = (Ints)_mm512_unpackhi_epi16(high, next_high);
}

// Reorders the sums of such steps by dimension.
QUIRE_INLINE void order_quarters(Words (&sums)[4]) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
  exchange<4>(sums[0], sums[1], lanes);
  exchange<4>(sums[2], sums[3], lanes);
  exchange<8>(sums[0], sums[2], lanes);
  exchange<8>(sums[1], sums[3], lanes);
}

// `add_values` for one row or two.
template <int kRows>
void add_rows(const SplitInt16Row* rows, const int8_t* const* values, const int8_t* const* next, int num_tokens,
              int num_next, int head_dim, float* sums, int sums_stride, const float* rescale) {
  for (int dim = 0; dim < head_dim; dim += kByteDims) {
    Ints high[kRows][4]{}, low[kRows][4]{};
    for (int token = 0; token < num_tokens; token += 4) {
      Ints bytes[4];
#pragma GCC unroll 4
      for (int idx = 0; idx < 4; ++idx) {  // past the end the last value is repeated; its weight is 0
        bytes[idx] = load_bytes(values[token + idx < num_tokens ? token + idx : num_tokens - 1] + dim);
        if (token + idx < num_next) {
          fetch(next[token + idx] + dim);
          if (dim == 0) fetch(next[token + idx] + head_dim);  // the scale
        }
      }
      interleave_bytes(bytes);
#pragma GCC unroll 2
      for (int row = 0; row < kRows; ++row) {
        const Ints highs = Ints{} + load_bits<int32_t>(rows[row].high + token);
        const Ints lows = Ints{} + load_bits<int32_t>(rows[row].low + token);
#pragma GCC unroll 4
        for (int vector = 0; vector < 4; ++vector) {
          multiply_bytes(high[row][vector], bytes[vector], highs);
          multiply_bytes(low[row][vector], bytes[vector], lows);
        }
      }
    }
#pragma GCC unroll 2
    for (int row = 0; row < kRows; ++row) {
      Words totals[4];
#pragma GCC unroll 4
      for (int vector = 0; vector < 4; ++vector)
        totals[vector] = bit_cast<Words>(low[row][vector] + (high[row][vector] << 8));
      order_quarters(totals);
#pragma GCC unroll 4
      for (int vector = 0; vector < 4; ++vector) {
        float* const to = sums + row * sums_stride + dim + vector * kLanes;
        store(to, load(to) * rescale[row] + rows[row].value(bit_cast<Ints>(totals[vector])));
      }
    }
  }
}

// Calls `body(row, number of rows)` for pairs of rows and for the last one of an odd number; the number is a constant.
template <int kRows, typename Body>
QUIRE_INLINE void in_pairs(Body body) {
  for (int row = 0; row + 2 <= kRows; row += 2) body(row, std::integral_constant<int, 2>());
  if constexpr (kRows % 2) body(kRows - 1, std::integral_constant<int, 1>());
}

// scales: output, the scales of the keys in whole vectors.
template <int kRows>
void score_bytes(const SplitInt16Row* rows, const int8_t* const* keys, int64_t ahead, int num_tokens, int head_dim,
                 float* scores, int stride, float* scales) {
  in_pairs<kRows>([&](int row, auto count) {
    score_rows<count.value>(rows + row, keys, ahead, num_tokens, head_dim, scores + row * stride, stride, scales);
  });
}

// rows: weights; 0 past the tokens, up to a whole vector.
template <int kRows>
void add_bytes(const SplitInt16Row* rows, const int8_t* const* values, const int8_t* const* next, int num_tokens,
               int num_next, int head_dim, float* sums, int sums_stride, const float* rescale) {
  in_pairs<kRows>([&](int row, auto count) {
    add_rows<count.value>(rows + row, values, next, num_tokens, num_next, head_dim, sums + row * sums_stride,
                          sums_stride, rescale + row);
  });
}

}  // namespace
#endif
