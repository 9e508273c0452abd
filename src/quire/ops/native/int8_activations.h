// Rows of int8 activations, and their products with weights of bytes.
//
// Each group of inputs that share a scale in the weight is scaled by its largest magnitude in the row: x is about
// q * largest / 127, where q = round(x * 127 / largest), ties to even. Rows of real models have a few values 15 to 25
// times as large as the others: with one scale for a row, these would leave the others a few levels. A step is four
// values of a row and four weights, whose products are added to a sum of 32 bits.
#pragma once

#include <memory>

#include "linear.h"
#include "parallel.h"

namespace {

constexpr int kStepBytes = 4;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
// Groups without a larger magnitude count as zeros: smaller scales would leave the range of floats.
constexpr float kSmallest = 1e-30f;

typedef int16_t Shorts __attribute__((vector_size(4 * QUIRE_LANES)));

// ---- products ----

// Returns the sums of pairs of products.
QUIRE_INLINE Ints multiply_pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif QUIRE_LANES == 8
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const Ints low_a = (bit_cast<Ints>(a) << 16) >> 16, low_b = (bit_cast<Ints>(b) << 16) >> 16;
  return low_a * low_b + (bit_cast<Ints>(a) >> 16) * (bit_cast<Ints>(b) >> 16);
#endif
}

// The even and the odd bytes of a step in 16 bits each.
QUIRE_INLINE Shorts even_bytes(Ints step) { return (bit_cast<Shorts>(step) << 8) >> 8; }
QUIRE_INLINE Shorts odd_bytes(Ints step) { return bit_cast<Shorts>(step) >> 8; }

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool kHasVnni = true;
#else
constexpr bool kHasVnni = false;
#endif

// Offset of each int8 weight where its bytes are to be unsigned. The start values of the sums compensate for it.
constexpr int kWeightOffset = kHasVnni ? 128 : 0;

// Adds the products of four weights and four values to `sum`, in each lane.
QUIRE_INLINE void multiply_add(Ints& sum, Ints weights, Ints values) {
#if defined(__AVX512VNNI__)
  sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)values);
#elif defined(__AVXVNNI__)
  sum = (Ints)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)weights, (__m256i)values);
#elif QUIRE_LANES == 8
  // A pair of products fits in 16 bits: a weight may be -128, whose magnitude is an unsigned byte; a value never is.
  const __m256i pairs =
      _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)weights), _mm256_sign_epi8((__m256i)values, (__m256i)weights));
  sum += multiply_pairs((Shorts)pairs, Shorts{} + 1);
#else
  sum += multiply_pairs(even_bytes(weights), even_bytes(values));
  sum += multiply_pairs(odd_bytes(weights), odd_bytes(values));
#endif
}

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

// Rounds a group of inputs to values of int8, and returns its scale. A group with a non-finite value becomes zeros with
// the scale NaN.
//
// sum: gets the sum of the values.
template <int kGroup, typename T>
QUIRE_INLINE float round_inputs(const T* from, int8_t* to, int32_t* sum) {
  constexpr int kVectors = kGroup / kLanes;
  // Magnitudes have the same order as integers, and non-finite ones are above all others.
  constexpr int32_t kMagnitude = 0x7fffffff, kInfinite = 0x7f800000;
  Floats values[kVectors];
  Ints highest{};
#pragma GCC unroll 8
  for (int vector = 0; vector < kVectors; ++vector) {
    values[vector] = load(from + vector * kLanes);
    highest = max(highest, bit_cast<Ints>(values[vector]) & kMagnitude);
  }
  const int32_t bits = max_of(highest)[0];
  const float largest = bits < kInfinite ? bit_cast<float>(bits) : kNaN;
  if (!(largest >= kSmallest)) {
    std::memset(to, 0, kGroup);
    *sum = 0;
    return largest == largest ? 0.0f : kNaN;
  }
  const float inverse = 127.0f / largest;
  Ints total{};
#pragma GCC unroll 8
  for (int vector = 0; vector < kVectors; ++vector) {
    const Ints rounded = nearest(values[vector] * inverse);
    store_bits(to + vector * kLanes, __builtin_convertvector(rounded, Bytes));
    total += rounded;
  }
  *sum = sum_of(total)[0];
  return largest / 127.0f;
}

// Rows of int8 as the first operand of a product with weights whose groups have `kGroup` inputs. Rows are padded with
// zeros to whole groups.
template <int kGroup>
struct Int8Rows {
  int width;       // a multiple of `kGroup`
  int num_groups;
  std::unique_ptr<int8_t[]> values;  // [rows, width]
  std::unique_ptr<float[]> scales;   // [rows, num_groups]
  std::unique_ptr<int32_t[]> sums;   // of the values of groups, [rows, num_groups]

  template <typename T>
  Int8Rows(const T* x, int64_t row_stride, int64_t num_rows, int num_inputs)
      : width(round_up(num_inputs, kGroup)),
        num_groups(width / kGroup),
        values(new int8_t[num_rows * width]),
        scales(new float[num_rows * num_groups]),
        sums(new int32_t[num_rows * num_groups]) {
    constexpr int kFewRows = 8;  // finished before another thread has woken up
    quire::in_parallel(num_rows, kFewRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* from = x + row * row_stride;
        for (int group = 0; group < num_groups; ++group) {
          const int first = group * kGroup, count = std::min(kGroup, num_inputs - first);
          const int64_t place = row * num_groups + group;
          T padded[kGroup] = {};
          if (count < kGroup) std::copy_n(from + first, count, padded);
          scales[place] = round_inputs<kGroup>(count < kGroup ? padded : from + first,
                                               values.get() + row * width + first, sums.get() + place);
        }
      }
    });
  }
};

}  // namespace
