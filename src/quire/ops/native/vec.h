// Vectors of floats of the instruction set's width, by the compiler's own vector types: no kernel names a register
// width or an instruction set. Operations that an instruction set does far better than plain vectors are chosen here.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define QUIRE_LANES 16
#elif defined(__AVX2__)
#define QUIRE_LANES 8
#else
#define QUIRE_LANES 4
#endif

#define QUIRE_INLINE inline __attribute__((always_inline))

namespace {

constexpr int kLanes = QUIRE_LANES;
#if QUIRE_LANES == 16 || defined(__aarch64__)
constexpr int kRegisters = 32;  // number of vector registers
#else
constexpr int kRegisters = 16;
#endif
constexpr float kInfinity = std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(4 * QUIRE_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * QUIRE_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * QUIRE_LANES)));
typedef int8_t Bytes __attribute__((vector_size(QUIRE_LANES)));            // a quarter as wide
typedef uint16_t Halves __attribute__((vector_size(2 * QUIRE_LANES)));     // half as wide
typedef uint16_t HalfPairs __attribute__((vector_size(4 * QUIRE_LANES)));  // as wide as Floats

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// The compiler's own type of such values, for conversions. GCC knows _Float16 on ARM in C++ from version 13 on only.
#if defined(__aarch64__)
typedef __fp16 NativeHalf;
#else
typedef _Float16 NativeHalf;
#endif

template <typename Vector, typename T>
QUIRE_INLINE Vector load_bits(const T* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(Vector));
  return vector;
}

template <typename Vector, typename T>
QUIRE_INLINE void store_bits(T* to, Vector vector) {
  std::memcpy(to, &vector, sizeof(Vector));
}

template <typename To, typename From>
QUIRE_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

QUIRE_INLINE Floats splat(float value) { return value - Floats{}; }

template <typename Vector>
QUIRE_INLINE Vector max(Vector a, Vector b) {
  return a > b ? a : b;
}

// ---- values in memory, type by type; the remainders of rows smaller than a vector use the scalar forms ----

QUIRE_INLINE Floats load(const float* from) { return load_bits<Floats>(from); }
QUIRE_INLINE void store(float* to, Floats values) { store_bits(to, values); }
QUIRE_INLINE float widen(float value) { return value; }
QUIRE_INLINE void narrow(float* to, float value) { *to = value; }

// Conversion between 16 and 32 bits. GCC converts plain vectors in two halves and joins them.
QUIRE_INLINE Words widen_words(Halves values) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32((__m256i)values);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)values);
#else
  return __builtin_convertvector(values, Words);
#endif
}

QUIRE_INLINE Halves narrow_words(Words values) {
#if defined(__AVX512F__)
  return (Halves)_mm512_cvtepi32_epi16((__m512i)values);
#else
  return __builtin_convertvector(values, Halves);
#endif
}

QUIRE_INLINE Floats load(const BFloat16* from) { return bit_cast<Floats>(widen_words(load_bits<Halves>(from)) << 16); }

QUIRE_INLINE float widen(BFloat16 value) { return bit_cast<float>(uint32_t(value.bits) << 16); }

// Rounds to the nearest, ties to even; a NaN stays a NaN.
QUIRE_INLINE Halves round_to_bfloat16(Floats values) {
#if defined(__AVX512BF16__)
  return bit_cast<Halves>(_mm512_cvtneps_pbh((__m512)values));
#else
  const Words bits = bit_cast<Words>(values);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words nan = Words{} + 0x7fc0;
  return narrow_words(values == values ? rounded : nan);
#endif
}

QUIRE_INLINE void store(BFloat16* to, Floats values) { store_bits(to, round_to_bfloat16(values)); }

QUIRE_INLINE void narrow(BFloat16* to, float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  to->bits = value == value ? uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : uint16_t(0x7fc0);
}

QUIRE_INLINE float widen(Float16 value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#else
  return float(bit_cast<NativeHalf>(value.bits));
#endif
}

QUIRE_INLINE void narrow(Float16* to, float value) {
#if defined(__F16C__)
  to->bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
  to->bits = bit_cast<uint16_t>(NativeHalf(value));
#endif
}

QUIRE_INLINE Floats load(const Float16* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(load_bits<__m256i>(from));
#elif defined(__F16C__) && QUIRE_LANES == 8
  return (Floats)_mm256_cvtph_ps(load_bits<__m128i>(from));
#else
  Floats values;
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = widen(from[lane]);
  return values;
#endif
}

QUIRE_INLINE void store(Float16* to, Floats values) {
#if defined(__AVX512F__)
  store_bits(to, _mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && QUIRE_LANES == 8
  store_bits(to, _mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int lane = 0; lane < kLanes; ++lane) narrow(to + lane, values[lane]);
#endif
}

QUIRE_INLINE float widen(int8_t value) { return float(value); }

QUIRE_INLINE Floats load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bits<__m128i>(from)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  return __builtin_convertvector(load_bits<Bytes>(from), Floats);
#endif
}

// Loads the values of two vectors as bfloat16, which represents every int8 exactly.
QUIRE_INLINE HalfPairs load_halves(const BFloat16* from) { return load_bits<HalfPairs>(from); }

#if defined(__AVX512BF16__)
QUIRE_INLINE HalfPairs load_halves(const int8_t* from) {
  return (HalfPairs)_mm512_cvtne2ps_pbh((__m512)load(from + kLanes), (__m512)load(from));
}
#endif

// Rounds to the nearest, ties to even; a NaN becomes 0. The values are in [-127, 127].
QUIRE_INLINE void store(int8_t* to, Floats values) {
  const Floats magic = splat(12582912.0f);  // as in `exponential`
  const Ints rounded = bit_cast<Ints>(values + magic) - bit_cast<Ints>(magic);
  store_bits(to, __builtin_convertvector(values == values ? rounded : Ints{}, Bytes));
}

QUIRE_INLINE void narrow(int8_t* to, float value) { *to = int8_t(value == value ? __builtin_rintf(value) : 0.0f); }

// Prefetches data that is read soon, into the second-level cache: the first level has too few outstanding misses to
// keep the memory busy. Blocks have arbitrary addresses, so the processor cannot predict them; it reads 4 KiB pieces in
// a random order at 10 GB/s per core, at 11 with prefetches into the first level and at 16 with these (Zen 4).
template <typename T>
QUIRE_INLINE void fetch(const T* from) {
  __builtin_prefetch(from, 0, 2);
}

// Prefetches once more the vector that is read 4 KiB after that of a token: some prefetches that are issued faster than
// memory answers seem to be lost (Zen 4).
template <typename T>
QUIRE_INLINE void fetch_again(const T* const* vectors, int token, int num_tokens, int width) {
  const int behind = token + 4096 / int(sizeof(T)) / width;
  const T* const vector = vectors[behind < num_tokens ? behind : num_tokens - 1];
  for (int value = 0; value < width; value += int(64 / sizeof(T))) fetch(vector + value);
}

// True where a cache line begins, counted from a vector's first value: one prefetch per line is enough.
template <typename T>
QUIRE_INLINE bool starts_line(int dim) {
  return dim * int(sizeof(T)) % 64 == 0;
}

// ---- across lanes ----

// Exchanges the lanes whose indices differ in the bit `kStep`.
template <int kStep, typename Vector, int... kLane>
QUIRE_INLINE Vector swapped(Vector values, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(values, values, (kLane ^ kStep)...);
}

// The sum and the maximum of all lanes, in every lane.
template <int kStep = kLanes / 2, typename Vector>
QUIRE_INLINE Vector sum_of(Vector values) {
  const Vector sums = values + swapped<kStep>(values, std::make_integer_sequence<int, kLanes>());
  if constexpr (kStep > 1) return sum_of<kStep / 2>(sums);
  return sums;
}

template <int kStep = kLanes / 2, typename Vector>
QUIRE_INLINE Vector max_of(Vector values) {
  const Vector larger = max(values, swapped<kStep>(values, std::make_integer_sequence<int, kLanes>()));
  if constexpr (kStep > 1) return max_of<kStep / 2>(larger);
  return larger;
}

// Exchanges lanes of two rows whose indices differ in the bit `kStep`.
template <int kStep, int... kLane>
QUIRE_INLINE void exchange(Words& a, Words& b, std::integer_sequence<int, kLane...>) {
  const Words low = __builtin_shufflevector(a, b, (kLane & kStep ? kLanes + kLane - kStep : kLane)...);
  const Words high = __builtin_shufflevector(a, b, (kLane & kStep ? kLanes + kLane : kLane + kStep)...);
  a = low;
  b = high;
}

// Transposes a square of 32-bit values in place, in as many rounds as a lane's index has bits.
template <int kStep = 1>
QUIRE_INLINE void transpose(Words (&rows)[kLanes]) {
  if constexpr (kStep < kLanes) {
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row)
      if (!(row & kStep)) exchange<kStep>(rows[row], rows[row + kStep], std::make_integer_sequence<int, kLanes>());
    transpose<2 * kStep>(rows);
  }
}

// Adds up vectors: lane i of `sums_of<kLanes, 1>` is the sum of vector i. The rounds can be separated: `sums_of<kLanes
// / n, n>` completes the results of `sums_of<n, 1>` for n vectors at a time.
template <int kCount, int kStep, typename Vector>
QUIRE_INLINE Vector sums_of(Vector* vectors) {
  if constexpr (kCount == 1) {
    return vectors[0];
  } else {
#pragma GCC unroll 8
    for (int pair = 0; pair < kCount / 2; ++pair) {
      Words low = bit_cast<Words>(vectors[2 * pair]), high = bit_cast<Words>(vectors[2 * pair + 1]);
      exchange<kStep>(low, high, std::make_integer_sequence<int, kLanes>());
      vectors[pair] = bit_cast<Vector>(low) + bit_cast<Vector>(high);
    }
    return sums_of<kCount / 2, 2 * kStep>(vectors);
  }
}

// The values of two vectors, alternating: a0 b0 a1 b1 ..., the first half and the second.
struct Interleaved {
  HalfPairs low, high;
};

template <int... kLane>
QUIRE_INLINE Interleaved interleave(HalfPairs a, HalfPairs b, std::integer_sequence<int, kLane...>) {
  return {__builtin_shufflevector(a, b, (kLane % 2 * 2 * kLanes + kLane / 2)...),
          __builtin_shufflevector(a, b, (kLane % 2 * 2 * kLanes + kLanes + kLane / 2)...)};
}

QUIRE_INLINE Interleaved interleave(HalfPairs a, HalfPairs b) {
  return interleave(a, b, std::make_integer_sequence<int, 2 * kLanes>());
}

#if defined(__AVX512BF16__)
// Pairs of bfloat16 from two vectors, lane by lane: a's low, b's high.
template <int... kLane>
QUIRE_INLINE HalfPairs pairs_of(HalfPairs both, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(both, both, (kLane % 2 * kLanes + kLane / 2)...);
}

QUIRE_INLINE HalfPairs pairs_of(Floats a, Floats b) {
  return pairs_of(bit_cast<HalfPairs>(_mm512_cvtne2ps_pbh((__m512)b, (__m512)a)),
                  std::make_integer_sequence<int, 2 * kLanes>());
}
#endif

// ---- functions ----

// Returns the largest magnitude of values, or NaN if there is one: as integers, magnitudes have the same order as
// floats, and a NaN is the largest.
template <typename T>
QUIRE_INLINE float largest_magnitude(const T* from, int64_t count) {
  const auto magnitude = [](auto value) { return value & 0x7fffffff; };
  Ints highest{};
  int64_t idx = 0;
  for (; idx + kLanes <= count; idx += kLanes) highest = max(highest, magnitude(bit_cast<Ints>(load(from + idx))));
  int32_t largest = max_of(highest)[0];
  for (; idx < count; ++idx) {
    const int32_t here = magnitude(bit_cast<int32_t>(widen(from[idx])));
    largest = here > largest ? here : largest;
  }
  return bit_cast<float>(largest);
}

// e to the power of each lane: relative error below 3e-7 in [-87, 88], 0 below, e^88 above; a NaN stays one.
// A power of two and a polynomial of the rest, which is at most ln(2) / 2: the one of the fifth order, beginning with
// 1 + x, whose largest relative error is least (1.05e-7).
QUIRE_INLINE Floats exponential(Floats x) {
  const Floats limited = x > 88.0f ? splat(88.0f) : x;
#if defined(__AVX512F__)
  const Floats power =
      (Floats)_mm512_roundscale_ps((__m512)(limited * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT);
#else
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats rounded = limited * 1.44269504088896341f + magic;
  const Floats power = rounded - magic;
#endif
  const Floats rest = (limited - power * 0.693145751953125f) - power * 1.42860682030941723212e-6f;
  Floats value = splat(0.00831252618f);
  value = value * rest + 0.0418901156f;
  value = value * rest + 0.166671145f;
  value = value * rest + 0.499992318f;
  value = value * rest + 1.0f;
  value = value * rest + 1.0f;
#if defined(__AVX512F__)
  const __mmask16 is_above = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-87.0f), _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_scalef_ps(is_above, (__m512)value, (__m512)power);
#else
  const Ints exponent = bit_cast<Ints>(rounded) - bit_cast<Ints>(magic);
  const Floats scaled = bit_cast<Floats>(bit_cast<Ints>(value) + (exponent << 23));
  return x < -87.0f ? Floats{} : (x == x ? scaled : x);
#endif
}

// Two to the power of each lane, of which none is above 127; 0 far below -126, and of minus infinity. A NaN stays one.
// A power of two and a polynomial of the rest, which is at most 1/2: the one beginning with 1 whose largest relative
// error is least, 9e-8 for the fifth order, 3e-6 for the fourth, which is all that a rounding to bfloat16 can tell.
template <bool kIsRounded>
QUIRE_INLINE Floats power_of_two(Floats x) {
#if defined(__AVX512F__)
  const Floats rest = (Floats)_mm512_maskz_reduce_ps(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
  const Floats power = x - rest;
#else
  const Floats magic = splat(12582912.0f);  // as in `exponential`
  const Floats rounded = x + magic;
  const Floats rest = x - (rounded - magic);
#endif
  Floats value;
  if constexpr (kIsRounded) {
    value = splat(0.00958285294f) * rest + 0.0559064262f;
    value = value * rest + 0.240240991f;
    value = value * rest + 0.693124175f;
  } else {
    value = splat(0.00132647273f) * rest + 0.00967151299f;
    value = value * rest + 0.0555073358f;
    value = value * rest + 0.240222424f;
    value = value * rest + 0.693147004f;
  }
  value = value * rest + 1.0f;
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_scalef_ps(0xffff, (__m512)value, (__m512)power);
#else
  const Ints exponent = bit_cast<Ints>(rounded) - bit_cast<Ints>(magic);
  const Floats scaled = bit_cast<Floats>(bit_cast<Ints>(value) + (exponent << 23));
  return x < -126.0f ? Floats{} : (x == x ? scaled : x);
#endif
}

}  // namespace
