// Sums of the products of a group, up to a whole number: how they are added up in each instruction set, and how weights
// are unpacked for that.
#pragma once

#include "grouped_form.h"

namespace {

// Sums of a group's products, up to a whole number. kMaxCode: the largest code, 255 where codes may have a sign.
template <int kMaxCode>
struct Sums {
  using Sum = Ints;
  static constexpr int kMostSteps = 64;

  static QUIRE_INLINE void add(Sum& sum, Ints weights, Ints values) { multiply_add(sum, weights, values); }
  static QUIRE_INLINE Ints total(Sum sum) { return sum; }
};

#if !(defined(__AVX512VNNI__) || defined(__AVXVNNI__)) && (QUIRE_LANES == 8 || defined(__AVX512BW__))

// Products of small codes without a sign add up in 16 bits for a few steps.
template <int kMaxCode>
struct ShortSums {
  using Sum = Shorts;
  static constexpr int kMostSteps = 32767 / (2 * 127 * kMaxCode);

  static QUIRE_INLINE void add(Sum& sum, Ints weights, Ints values) {
#if QUIRE_LANES == 8
    sum += (Shorts)_mm256_maddubs_epi16((__m256i)weights, (__m256i)values);
#else
    sum += (Shorts)_mm512_maddubs_epi16((__m512i)weights, (__m512i)values);
#endif
  }

  static QUIRE_INLINE Ints total(Sum sum) {
#if QUIRE_LANES == 8
    return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#else
    return (Ints)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
#endif
  }
};

template <>
struct Sums<15> : ShortSums<15> {};
template <>
struct Sums<31> : ShortSums<31> {};
template <>
struct Sums<63> : ShortSums<63> {};

#endif

// The values of codes, [16], as bytes of the instruction set's sign.
struct Levels {
  alignas(16) uint8_t bytes[16];

  explicit Levels(const int8_t* values) {
    for (int code = 0; code < 16; ++code) bytes[code] = values ? uint8_t(values[code] + kWeightOffset) : 0;
  }

  QUIRE_INLINE Ints look_up(Ints codes) const {
#if QUIRE_LANES == 16 && defined(__AVX512BW__)
    return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_bits<__m128i>(bytes)), (__m512i)codes);
#elif QUIRE_LANES == 8
    return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_bits<__m128i>(bytes)), (__m256i)codes);
#else
    uint8_t values[sizeof(Ints)];
    store_bits(values, codes);
    for (uint8_t& value : values) value = bytes[value & 15];
    return load_bits<Ints>(values);
#endif
  }
};

// A weight, or some of its columns, of one form.
struct GroupedWeight {
  const uint8_t* panels;
  const int8_t* levels;  // [16], or null
  int offset;            // of codes
  int num_slices;        // of the inputs, at most; see `num_slices_of`

  // What the sum of a group's values is multiplied with, and taken off.
  template <typename Form>
  int whole_offset() const {
    return Form::kHasLevels ? kWeightOffset : offset + Form::kShift;
  }
};

template <typename Form>
using SumsOf = Sums<Form::kHasLevels ? 255 : (1 << Form::kBits) - 1>;

// Returns whether the products of a group add up in 16 bits.
template <typename Form>
constexpr bool is_short() {
  return !std::is_same_v<typename SumsOf<Form>::Sum, Ints> && SumsOf<Form>::kMostSteps >= Form::kSteps;
}

// Returns the start value of a lane's sum, which takes the offset of codes off, as those of its two sums of 16 bits.
// Halves keep both in range at the end, which is all that counts: with codes up to c and an offset up to 2 c, neither
// exceeds 127 c for each value.
inline int32_t short_start(int32_t value) {
  const int32_t low = value >> 1;
  return int32_t(uint32_t(value - low) << 16 | (uint32_t(low) & 0xffff));
}

// Adds up the products of a group's unpacked steps in 16 bits.
//
// starts: start values of the rows' sums, `start_stride` from row to row; see `short_start`.
template <typename Form, int kRows>
QUIRE_INLINE void add_short_group(const int8_t* values, int width, const uint8_t* steps, const int32_t* starts,
                                  int start_stride, Ints (&products)[kRows][kTileVectors]) {
  using Adder = SumsOf<Form>;
  typename Adder::Sum parts[kRows][kTileVectors];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector)
      parts[row][vector] = bit_cast<typename Adder::Sum>(Ints{} + starts[row * start_stride]);
  // Step by step: unrolled, the compiler moves products ahead and sums into memory.
#pragma GCC unroll 1
  for (int step = 0; step < Form::kSteps; ++step, steps += kStepPanel) {
    Ints weights[kTileVectors];
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector)
      weights[vector] = load_bits<Ints>(steps + vector * kLanes * kStepBytes);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const Ints value = broadcast(values + row * width + step * kStepBytes);
#pragma GCC unroll 4
      for (int vector = 0; vector < kTileVectors; ++vector) Adder::add(parts[row][vector], weights[vector], value);
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector) products[row][vector] = Adder::total(parts[row][vector]);
}

// Returns whether bytes are unpacked to 16 bits for many rows: no instruction multiplies bytes with a sign.
template <typename Form>
constexpr bool is_wide() {
  return !kHasVnni && std::is_same_v<typename SumsOf<Form>::Sum, Ints>;
}

// Copies the values of rows as they are multiplied by weights of 16 bits: of each step, the even ones come first.
inline std::unique_ptr<int16_t[]> widen_steps(const int8_t* values, int64_t num_steps) {
  std::unique_ptr<int16_t[]> wide(new int16_t[num_steps * kStepBytes]);
  quire::in_parallel(num_steps, 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * kStepBytes; at < end * kStepBytes; at += kStepBytes)
      for (int half = 0; half < 2; ++half)
        for (int pair = 0; pair < 2; ++pair) wide[at + 2 * half + pair] = values[at + 2 * pair + half];
  });
  return wide;
}

// Adds the products of a group's steps of 16 bits.
template <typename Form, int kRows>
QUIRE_INLINE void add_wide_group(const int16_t* values, int width, const uint8_t* steps,
                                 Ints (&products)[kRows][kTileVectors]) {
#pragma GCC unroll 1
  for (int half = 0; half < 2 * Form::kSteps; ++half, steps += kStepPanel) {
    Shorts weights[kTileVectors];
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector)
      weights[vector] = load_bits<Shorts>(steps + vector * kLanes * kStepBytes);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const auto value = bit_cast<Shorts>(Ints{} + load_bits<int32_t>(values + row * width + half * 2));
#pragma GCC unroll 4
      for (int vector = 0; vector < kTileVectors; ++vector)
        products[row][vector] += multiply_pairs(weights[vector], value);
    }
  }
}

// Stores a vector of a step of weights for many rows, at the place of its columns.
template <typename Form>
QUIRE_INLINE void store_unpacked(uint8_t* step, int vector, Ints weights) {
  uint8_t* const place = step + vector * kLanes * kStepBytes;
  if constexpr (is_wide<Form>()) {
    store_bits(place, even_bytes(weights));
    store_bits(place + kStepPanel, odd_bytes(weights));
  } else {
    store_bits(place, weights);
  }
}

// Bytes of an unpacked step of a panel.
template <typename Form>
constexpr int unpacked_step() {
  return is_wide<Form>() ? 2 * kStepPanel : kStepPanel;
}

// Unpacks groups to bytes or to 16 bits, [groups, kSteps, kPanel] steps.
template <typename Form>
void unpack_groups(const uint8_t* from, int num_groups, const Levels& levels, uint8_t* steps) {
  for (int group = 0; group < num_groups; ++group) {
    const uint8_t* codes = Form::group_of(from, group);
    for (int pair = 0; pair < Form::kPairs; ++pair, steps += 2 * unpacked_step<Form>())
#pragma GCC unroll 4
      for (int vector = 0; vector < kTileVectors; ++vector) {
        Ints first, second;
        Form::unpack_pair(codes, pair, vector, first, second);
        if constexpr (Form::kHasLevels) {
          first = levels.look_up(first);
          second = levels.look_up(second);
        }
        store_unpacked<Form>(steps, vector, first);
        store_unpacked<Form>(steps + unpacked_step<Form>(), vector, second);
      }
  }
}

}  // namespace
