// Rows of int8 activations, and their products with weights of bytes.
//
// A row is scaled by its largest magnitude: q = round(x * 127 / largest), ties to even, so x is about q * largest /
// 127. A step is four values of a row and four weights, whose products are added to a sum of 32 bits.
#pragma once

#include <memory>

#include "linear.h"
#include "parallel.h"

namespace {

constexpr int kStepBytes = 4;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
// Rows and groups without a larger magnitude count as zeros: smaller scales would leave the range of floats.
constexpr float kSmallest = 1e-30f;

typedef int16_t Shorts __attribute__((vector_size(4 * QUIRE_LANES)));

// ---- products ----

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define QUIRE_VNNI 1

// Offset of each int8 weight, which makes its bytes unsigned. The start values of the sums compensate for it.
constexpr int kWeightOffset = 128;

// Adds the products of four unsigned weights and four values to `sum`, in each lane.
QUIRE_INLINE void multiply_add(Ints& sum, Ints weights, Ints values) {
#if defined(__AVX512VNNI__)
  sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)values);
#else
  sum = (Ints)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)weights, (__m256i)values);
#endif
}

#elif QUIRE_LANES == 8

constexpr int kWeightOffset = 0;

// A pair of products fits in 16 bits: a weight may be -128, whose magnitude is an unsigned byte; a value never is.
QUIRE_INLINE void multiply_add(Ints& sum, Ints weights, Ints values) {
  const __m256i pairs =
      _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)weights), _mm256_sign_epi8((__m256i)values, (__m256i)weights));
  sum += (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

#else

constexpr int kWeightOffset = 0;

// Returns the sums of pairs of products.
QUIRE_INLINE Ints multiply_pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__SSE2__)
  return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const Ints low_a = (bit_cast<Ints>(a) << 16) >> 16, low_b = (bit_cast<Ints>(b) << 16) >> 16;
  return low_a * low_b + (bit_cast<Ints>(a) >> 16) * (bit_cast<Ints>(b) >> 16);
#endif
}

QUIRE_INLINE void multiply_add(Ints& sum, Ints weights, Ints values) {
  const Shorts a = bit_cast<Shorts>(weights), b = bit_cast<Shorts>(values);
  sum += multiply_pairs((a << 8) >> 8, (b << 8) >> 8) + multiply_pairs(a >> 8, b >> 8);
}

#endif

// Loads a step of a row into every lane.
QUIRE_INLINE Ints broadcast(const int8_t* step) { return Ints{} + load_bits<int32_t>(step); }

// ---- rounding ----

// Rounds to the nearest integers, ties to even; they must be in range.
QUIRE_INLINE Ints nearest(Floats values) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)values);
#elif QUIRE_LANES == 8
  return (Ints)_mm256_cvtps_epi32((__m256)values);
#elif defined(__SSE2__)
  return (Ints)_mm_cvtps_epi32((__m128)values);
#else
  Ints numbers;
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = int32_t(__builtin_rintf(values[lane]));
  return numbers;
#endif
}

// Returns the largest magnitude, or NaN where a value is not finite.
template <typename T>
float largest_of(const T* values, int count) {
  // Magnitudes have the same order as integers, and non-finite ones are above all others.
  constexpr int32_t kMagnitude = 0x7fffffff, kInfinite = 0x7f800000;
  Ints found{};
  int idx = 0;
  for (; idx + kLanes <= count; idx += kLanes) {
    const Ints magnitudes = bit_cast<Ints>(load(values + idx)) & kMagnitude;
    found = magnitudes > found ? magnitudes : found;
  }
  int32_t largest = 0;
  for (int lane = 0; lane < kLanes; ++lane) largest = std::max(largest, found[lane]);
  for (; idx < count; ++idx) largest = std::max(largest, bit_cast<int32_t>(widen(values[idx])) & kMagnitude);
  return largest < kInfinite ? bit_cast<float>(largest) : kNaN;
}

// Vectors of rounded values in memory: int8, or int16 for products of 16 bits.
template <typename Value>
struct Rounded {
  using Vector = Bytes;
};
template <>
struct Rounded<int16_t> {
  typedef int16_t Vector __attribute__((vector_size(2 * QUIRE_LANES)));
};

// Rounds a row to values of int8, and returns its scale. A row with a non-finite value becomes zeros with the scale
// NaN.
template <typename T, typename Value>
float round_row(const T* from, int width, Value* to) {
  const float largest = largest_of(from, width);
  if (!(largest >= kSmallest)) {
    std::memset(to, 0, width * sizeof(Value));
    return largest == largest ? 0.0f : kNaN;
  }
  const float inverse = 127.0f / largest;
  int idx = 0;
  for (; idx + kLanes <= width; idx += kLanes)
    store_bits(to + idx,
               __builtin_convertvector(nearest(load(from + idx) * inverse), typename Rounded<Value>::Vector));
  for (; idx < width; ++idx) to[idx] = Value(nearest(splat(widen(from[idx]) * inverse))[0]);
  return largest / 127.0f;
}

// Rows of int8 as the first operand of a product; each value is stored as a `Value`.
template <typename Value = int8_t>
struct Int8Rows {
  int width;
  int num_groups;                     // number of parts of a row with a sum each
  std::unique_ptr<Value[]> values;   // [rows, width]
  std::unique_ptr<float[]> scales;    // [rows]
  std::unique_ptr<int32_t[]> starts;  // start values of the sums, [rows, groups]

  // offset: offset of the weights.
  template <typename T>
  Int8Rows(const T* x, int64_t row_stride, int64_t num_rows, int width, int num_groups, int offset)
      : width(width),
        num_groups(num_groups),
        values(new Value[num_rows * width]),
        scales(new float[num_rows]),
        starts(new int32_t[num_rows * num_groups]) {
    constexpr int kFewRows = 8;  // finished before another thread has woken up
    quire::in_parallel(num_rows, kFewRows, [&](int64_t begin, int64_t end) {
      const int group = width / num_groups;
      for (int64_t row = begin; row < end; ++row) {
        Value* to = values.get() + row * width;
        scales[row] = round_row(x + row * row_stride, width, to);
        for (int part = 0; part < num_groups; ++part) {
          int32_t sum = 0;
          for (int idx = part * group; idx < (part + 1) * group; ++idx) sum += to[idx];
          starts[row * num_groups + part] = -offset * sum;
        }
      }
    });
  }
};

}  // namespace
