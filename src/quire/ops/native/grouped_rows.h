// Products of rows of int8 and weights whose groups of inputs share a scale.
//
// Within a group sums are whole numbers and exact; each is scaled by the group's scale in the weight and by that of its
// inputs. Groups are added up one after the other in float32, whatever rows are there: a row gets the same bits in every
// batch.
#pragma once

#include "grouped_form.h"

namespace {

// Rows of a tile: their sums of a group and those of all groups stay in registers.
constexpr int kGroupRows = 3;
// Rows of a tile whose weights are unpacked and whose sums of a group are one vector of 16 bits: of 16 registers, the
// sums of a group take eight, and those of all groups are in memory.
constexpr int kShortGroupRows = 4;

// Sums of a group's products, up to a whole number. kMaxCode: the largest code, 255 where codes may have a sign.
template <int kMaxCode>
struct Sums {
  using Sum = Ints;
  static constexpr int kMostSteps = 64;

  static QUIRE_INLINE void add(Sum& sum, Ints weights, Ints values) { multiply_add(sum, weights, values); }
  static QUIRE_INLINE Ints total(Sum sum) { return sum; }
};

#if !defined(QUIRE_VNNI) && (QUIRE_LANES == 8 || defined(__AVX512BW__))

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

#if defined(QUIRE_VNNI)

template <typename Form>
constexpr bool is_wide() {
  return false;
}

#else

// Returns whether bytes are unpacked to 16 bits for many rows: no instruction multiplies bytes with a sign.
template <typename Form>
constexpr bool is_wide() {
  return std::is_same_v<typename SumsOf<Form>::Sum, Ints>;
}

// Copies the values of rows as they are multiplied by weights of 16 bits: of each step, the even ones come first.
inline std::unique_ptr<int16_t[]> widen_steps(const int8_t* values, int64_t count) {
  std::unique_ptr<int16_t[]> wide(new int16_t[count]);
  for (int64_t idx = 0; idx < count; idx += kStepBytes)
    for (int half = 0; half < 2; ++half)
      for (int pair = 0; pair < 2; ++pair) wide[idx + 2 * half + pair] = values[idx + 2 * pair + half];
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

#endif

// Returns the number of rows up to which a tile is faster than memory.
template <typename Form>
constexpr int streamed_rows() {
  return is_wide<Form>() ? 0 : 1;
}

// Returns the number of rows up to which weights are unpacked as they are multiplied. Bytes are unpacked already; codes
// of four bits cost least of the others.
template <typename Form>
constexpr int packed_rows() {
  if (is_short<Form>() || (is_wide<Form>() && kLanes == 8)) return 12;
  const bool is_cheap = Form::kBits % 4 == 0 && !Form::kHasLevels && !is_wide<Form>();
  return is_cheap ? kJobRows : 2 * kGroupRows;
}

// Stores a vector of a step of weights for many rows, at the place of its columns.
template <typename Form>
QUIRE_INLINE void store_unpacked(uint8_t* step, int vector, Ints weights) {
#if !defined(QUIRE_VNNI)
  if constexpr (is_wide<Form>()) {
    store_bits(step + vector * kLanes * kStepBytes, even_bytes(weights));
    store_bits(step + kStepPanel + vector * kLanes * kStepBytes, odd_bytes(weights));
    return;
  }
#endif
  store_bits(step + vector * kLanes * kStepBytes, weights);
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

// Some rows, from a group on that is the first of a super-group. Each field is where the first row's begin.
struct RowsOfGroups {
  const int8_t* values;
  const float* scales;      // of groups of inputs
  const int32_t* sums;      // of the values of groups of weights
  const int32_t* starts;    // the same for `add_short_group`, or null
  const int16_t* wide;      // the values for `add_wide_group`, or null
  int width, num_scales, num_sums;  // of a whole row
};

// Adds the products of some groups to the sums [rows, kPanel].
//
// from: the groups, at the start of a super-group.
// unpacked: their weights as bytes, if they are to be taken from there.
// ahead: what is fetched meanwhile.
template <typename Form, int kRows, bool kIsUnpacked>
void multiply_groups(const RowsOfGroups& x, const uint8_t* from, const uint8_t* unpacked, int num_groups, int offset,
                     const Levels& levels, PanelPrefetch ahead, float* sums) {
  using Adder = SumsOf<Form>;
  constexpr bool kIsShort = !std::is_same_v<typename Adder::Sum, Ints>;
  constexpr bool kHasStarts = kIsUnpacked && is_short<Form>(), kIsWide = kIsUnpacked && is_wide<Form>();
  constexpr int kFlushPairs = std::min(Form::kPairs, Adder::kMostSteps / 2);
  static_assert(kFlushPairs > 0 && Form::kPairs % kFlushPairs == 0);
  Floats totals[kRows][kTileVectors];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector)
      totals[row][vector] = load(sums + row * kPanel + vector * kLanes);
  // Of two levels, the sums of a super-group, before its super-scale and super-minimum.
  [[maybe_unused]] Floats scaled[kRows][kTileVectors], lowered[kRows][kTileVectors];
  for (int group = 0; group < num_groups; ++group, from += Form::kGroupBytes) {
    if (Form::kIsTwoLevel && group % Form::kSuperGroups == 0) {
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int vector = 0; vector < kTileVectors; ++vector) scaled[row][vector] = lowered[row][vector] = Floats{};
    }
    const int8_t* const values = x.values + group * Form::kGroup;
    const float* const input_scales = x.scales + group * Form::kGroup / kInputGroup;
    const int32_t* const value_sums = x.sums + group;
    Ints products[kRows][kTileVectors];
    if constexpr (kHasStarts) {
      ahead.step();
      add_short_group<Form, kRows>(values, x.width, unpacked + group * Form::kSteps * kStepPanel, x.starts + group,
                                   x.num_sums, products);
    }
    if constexpr (!kIsShort) {
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int vector = 0; vector < kTileVectors; ++vector)
          products[row][vector] = Ints{} - offset * value_sums[row * x.num_sums];
    }
#if !defined(QUIRE_VNNI)
    if constexpr (kIsWide) {
      ahead.step();
      add_wide_group<Form, kRows>(x.wide + group * Form::kGroup, x.width,
                                  unpacked + group * Form::kSteps * unpacked_step<Form>(), products);
    }
#endif
#pragma GCC unroll 1
    for (int begin = kHasStarts || kIsWide ? Form::kPairs : 0; begin < Form::kPairs; begin += kFlushPairs) {
      typename Adder::Sum parts[kRows][kTileVectors];
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int vector = 0; vector < kTileVectors; ++vector) {
          if constexpr (kIsShort)
            parts[row][vector] = typename Adder::Sum{};
          else
            parts[row][vector] = products[row][vector];
        }
      // Unrolled, the compiler adds up the products in an order that takes more registers than there are.
#pragma GCC unroll 1
      for (int pair = begin; pair < begin + kFlushPairs; ++pair) {
        Ints weights[2][kTileVectors];  // of both steps
#pragma GCC unroll 4
        for (int vector = 0; vector < kTileVectors; ++vector) {
          if constexpr (kIsUnpacked) {
            const uint8_t* steps =
                unpacked + (group * Form::kSteps + 2 * pair) * kStepPanel + vector * kLanes * kStepBytes;
            weights[0][vector] = load_bits<Ints>(steps);
            weights[1][vector] = load_bits<Ints>(steps + kStepPanel);
          } else {
            Form::unpack_pair(from, pair, vector, weights[0][vector], weights[1][vector]);
            if constexpr (Form::kHasLevels) {
              weights[0][vector] = levels.look_up(weights[0][vector]);
              weights[1][vector] = levels.look_up(weights[1][vector]);
            }
          }
        }
        ahead.step();
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
          for (int step = 0; step < 2; ++step) {
            const Ints value = broadcast(values + row * x.width + (2 * pair + step) * kStepBytes);
#pragma GCC unroll 4
            for (int vector = 0; vector < kTileVectors; ++vector)
              Adder::add(parts[row][vector], weights[step][vector], value);
          }
        }
      }
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int vector = 0; vector < kTileVectors; ++vector) {
          const Ints total = Adder::total(parts[row][vector]);
          products[row][vector] = kIsShort && begin > 0 ? products[row][vector] + total : total;
        }
    }
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector) {
      const Floats scale = Form::scales(from, vector);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        Ints whole = products[row][vector];
        if constexpr (kIsShort && !kHasStarts) whole -= offset * value_sums[row * x.num_sums];
        if constexpr (Form::kHasZeros) whole -= Form::zero_points(from, vector) * value_sums[row * x.num_sums];
        (Form::kIsTwoLevel ? scaled : totals)[row][vector] +=
            __builtin_convertvector(whole, Floats) * (scale * input_scales[row * x.num_scales]);
      }
      if constexpr (Form::kHasMins) {
        const Floats minimum = Form::mins(from, vector);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          const Floats taken = minimum * (float(value_sums[row * x.num_sums]) * input_scales[row * x.num_scales]);
          if constexpr (Form::kIsTwoLevel)
            lowered[row][vector] += taken;
          else
            totals[row][vector] -= taken;
        }
      }
    }
    if (Form::kIsTwoLevel && group % Form::kSuperGroups == Form::kSuperGroups - 1) {
      const uint8_t* super = from + Form::kGroupBytes;
      from += Form::kSuperBytes;
#pragma GCC unroll 4
      for (int vector = 0; vector < kTileVectors; ++vector) {
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          totals[row][vector] += scaled[row][vector] * Form::super_scales(super, vector);
          if constexpr (Form::kHasMins) totals[row][vector] -= lowered[row][vector] * Form::super_mins(super, vector);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector)
      store(sums + row * kPanel + vector * kLanes, totals[row][vector]);
}

// Sums [num_rows, kPanel] of the rows from `first` on and the columns of one panel.
//
// num_groups: number of groups of the panel.
// starts, wide: start values of the sums of 16 bits, as many as sums of values; values of 16 bits; null where none are
// needed.
// kIsUnpacked: to unpack a code of more than four bits costs a tile more than its products do; for several tiles bytes
// are made of them once.
template <typename Form, bool kIsUnpacked>
void multiply_panel(const Int8Rows<Form::kGroup>& rows, const int32_t* starts, const int16_t* wide,
                    const GroupedWeight& weight, const Levels& levels, const uint8_t* panel, int num_groups,
                    int64_t first, int num_rows, float* sums) {
  constexpr int kUnpackedGroups = Form::kSuperGroups;
  alignas(64) uint8_t unpacked[kIsUnpacked ? kUnpackedGroups * Form::kSteps * unpacked_step<Form>() : 1];
  std::fill_n(sums, num_rows * kPanel, 0.0f);
  const int offset = weight.whole_offset<Form>();
  constexpr bool kHasStarts = kIsUnpacked && is_short<Form>(), kIsWide = kIsUnpacked && is_wide<Form>();
  // Half the bytes a step, or about: twice the steps of a piece.
  const int piece_steps = 2 * (num_rows <= kFewPieceRows ? kPieceSteps : kLongPieceSteps);
  const int piece = kIsUnpacked || (Form::kBits == 8 && num_rows > kGroupRows) ? kUnpackedGroups : piece_steps / Form::kSteps;
  for (int group = 0; group < num_groups; group += piece) {
    const int count = std::min(piece, num_groups - group), num_bytes = int(Form::bytes_of(count));
    const uint8_t* from = panel + Form::bytes_of(group);
    if constexpr (kIsUnpacked) unpack_groups<Form>(from, count, levels, unpacked);
    in_tiles<kHasStarts ? kShortGroupRows : kGroupRows>(num_rows, [&](int row, auto tile_rows) {
      const int num_steps = kHasStarts || kIsWide ? count : count * Form::kPairs;
      const PanelPrefetch ahead(from + num_bytes, num_bytes, num_steps, row, tile_rows.value, num_rows,
                                num_rows <= streamed_rows<Form>());
      const int64_t at = first + row, place = at * rows.num_sums + group;
      const RowsOfGroups x{rows.values.get() + at * rows.width + group * Form::kGroup,
                           rows.scales.get() + at * rows.num_scales + group * Form::kGroup / kInputGroup,
                           rows.sums.get() + place, kHasStarts ? starts + place : nullptr,
                           kIsWide ? wide + at * rows.width + group * Form::kGroup : nullptr,
                           rows.width, rows.num_scales, rows.num_sums};
      multiply_groups<Form, tile_rows.value, kIsUnpacked>(x, from, unpacked, count, offset, levels, ahead,
                                                          sums + row * kPanel);
    });
  }
}

// Multiplies rows by a weight of a form, and finishes them.
template <typename Form, typename T>
void multiply_grouped(const Operands& operands, int64_t num_rows, int width, const GroupedWeight& weight) {
  const Int8Rows<Form::kGroup> rows(static_cast<const T*>(operands.x), operands.row_stride, num_rows, width);
  std::unique_ptr<int32_t[]> starts;
  std::unique_ptr<int16_t[]> wide;
#if !defined(QUIRE_VNNI)
  if (is_wide<Form>() && num_rows > packed_rows<Form>()) wide = widen_steps(rows.values.get(), num_rows * rows.width);
#endif
  if (is_short<Form>() && num_rows > packed_rows<Form>()) {
    starts.reset(new int32_t[num_rows * rows.num_sums]);
    for (int64_t idx = 0; idx < num_rows * rows.num_sums; ++idx)
      starts[idx] = short_start(-weight.whole_offset<Form>() * rows.sums[idx]);
  }
  const Levels levels(weight.levels);
  const int num_groups = Form::num_groups(width);
  in_blocks<kPanel>(operands.num_columns, num_rows, [&](int number, int64_t first, int count) {
    alignas(64) float sums[kJobRows * kPanel];
    const uint8_t* panel = weight.panels + number * Form::panel_bytes(width);
    if (count > packed_rows<Form>())
      multiply_panel<Form, true>(rows, starts.get(), wide.get(), weight, levels, panel, num_groups, first, count, sums);
    else
      multiply_panel<Form, false>(rows, nullptr, nullptr, weight, levels, panel, num_groups, first, count, sums);
    for (int row = 0; row < count; ++row) finish<T>(sums + row * kPanel, operands, first + row, number);
  });
}

}  // namespace
