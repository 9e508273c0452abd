// Linear layers on weights of four bits, one bfloat16 scale for each group of 32 inputs, and rows of int8.
//
// Within a group sums are whole numbers and exact. Groups are added up one after the other in float32, whatever rows
// are there: a row gets the same bits in every batch.
#include <cmath>

#include "bytes.h"

namespace {

constexpr int kGroup = 32;
constexpr int kGroupSteps = kGroup / kStepBytes;
constexpr int kNibbleOffset = 8;  // added to weights of -8..7

// A group of a panel: [kPanel] scales, then for each pair of steps [kPanel] of them, the second in the upper halves.
constexpr int kPairBytes = kPanel * kStepBytes;
constexpr int kGroupBytes = kPanel * int(sizeof(BFloat16)) + kGroupSteps / 2 * kPairBytes;

// Rows of a tile: their sums of a group and those of all groups stay in registers.
constexpr int kGroupRows = 3;

// Sums of a group's products, from what they start with to a whole number.
#if QUIRE_LANES == 8 || (defined(__AVX512BW__) && !defined(__AVX512VNNI__))

// Products are so small that those of a whole group fit in 16 bits: 8 steps of pairs of 15 * 127.
using GroupSum = Shorts;

QUIRE_INLINE GroupSum first_sum(int32_t) { return GroupSum{}; }

QUIRE_INLINE void add_products(Shorts& sum, Ints weights, Ints values) {
#if QUIRE_LANES == 8
  sum += (Shorts)_mm256_maddubs_epi16((__m256i)weights, (__m256i)values);
#else
  sum += (Shorts)_mm512_maddubs_epi16((__m512i)weights, (__m512i)values);
#endif
}

QUIRE_INLINE Ints total_of(Shorts sum, int32_t start) {
#if QUIRE_LANES == 8
  return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)) + start;
#else
  return (Ints)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1)) + start;
#endif
}

#else

using GroupSum = Ints;

QUIRE_INLINE GroupSum first_sum(int32_t start) { return Ints{} + start; }
QUIRE_INLINE void add_products(Ints& sum, Ints weights, Ints values) { multiply_add(sum, weights, values); }
QUIRE_INLINE Ints total_of(Ints sum, int32_t) { return sum; }

#endif

constexpr int32_t kLowNibbles = 0x0f0f0f0f;

// Adds the products of some groups to the sums [rows, kPanel].
//
// starts: [rows, all groups of a row].
// ahead: what is fetched meanwhile.
template <int kRows>
void multiply_groups(const int8_t* x, int width, const int32_t* starts, const uint8_t* groups, int num_groups,
                     Ahead ahead, float* sums) {
  constexpr int32_t kLow = 0x0f0f0f0f;
  const int all_groups = width / kGroup;
  Floats totals[kRows][kTileVectors];
#pragma GCC unroll 3
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector) totals[row][vector] = load(sums + row * kPanel + vector * kLanes);
  for (int group = 0; group < num_groups; ++group) {
    const auto* scales = reinterpret_cast<const BFloat16*>(groups + group * kGroupBytes);
    const uint8_t* pairs = groups + group * kGroupBytes + kPanel * sizeof(BFloat16);
    const int8_t* values = x + group * kGroup;
    GroupSum products[kRows][kTileVectors];
#pragma GCC unroll 3
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int vector = 0; vector < kTileVectors; ++vector)
        products[row][vector] = first_sum(starts[row * all_groups + group]);
#pragma GCC unroll 1  // else the compiler adds up a group's products in an order that takes more registers than there are
    for (int pair = 0; pair < kGroupSteps / 2; ++pair) {
      Ints weights[2][kTileVectors];  // of both steps
#pragma GCC unroll 4
      for (int vector = 0; vector < kTileVectors; ++vector) {
        const Ints both = load_bits<Ints>(pairs + pair * kPairBytes + vector * kLanes * kStepBytes);
        weights[0][vector] = both & kLow;
        weights[1][vector] = (both >> 4) & kLow;
      }
      ahead.step();
#pragma GCC unroll 3
      for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
        for (int step = 0; step < 2; ++step) {
          const Ints value = broadcast(values + row * width + (2 * pair + step) * kStepBytes);
#pragma GCC unroll 4
          for (int vector = 0; vector < kTileVectors; ++vector)
            add_products(products[row][vector], weights[step][vector], value);
        }
      }
    }
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector) {
      const Floats scale = load(scales + vector * kLanes);
#pragma GCC unroll 3
      for (int row = 0; row < kRows; ++row) {
        const Ints total = total_of(products[row][vector], starts[row * all_groups + group]);
        totals[row][vector] += __builtin_convertvector(total, Floats) * scale;
      }
    }
  }
#pragma GCC unroll 3
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector) store(sums + row * kPanel + vector * kLanes, totals[row][vector]);
}

// Rows [first, first + num_rows) and the columns of one panel.
template <typename T>
void multiply_rows(const ByteRows& rows, const uint8_t* groups, const Operands& operands, int panel, int64_t first,
                   int num_rows) {
  alignas(64) float sums[kJobRows * kPanel];
  std::fill_n(sums, num_rows * kPanel, 0.0f);
  const int8_t* x = rows.values.get() + first * rows.width;
  const int32_t* starts = rows.starts.get() + first * rows.num_groups;
  // Half the bytes a step: twice the steps of a piece.
  const int piece = 2 * (num_rows <= kFewPieceRows ? kPieceSteps : kLongPieceSteps) / kGroupSteps;
  for (int group = 0; group < rows.num_groups; group += piece) {
    const int count = std::min(piece, rows.num_groups - group), num_bytes = count * kGroupBytes;
    const uint8_t* from = groups + group * kGroupBytes;
    in_tiles<kGroupRows>(num_rows, [&](int row, auto tile_rows) {
      const Ahead ahead(from + num_bytes, num_bytes, count * kGroupSteps / 2, row, tile_rows.value, num_rows);
      multiply_groups<tile_rows.value>(x + row * rows.width + group * kGroup, rows.width,
                                       starts + row * rows.num_groups + group, from, count, ahead, sums + row * kPanel);
    });
  }
  for (int row = 0; row < num_rows; ++row) {
    float* products = sums + row * kPanel;
    for (int column = 0; column < kPanel; column += kLanes)
      store(products + column, load(products + column) * rows.scales[first + row]);
    finish<T>(products, operands, first + row, panel);
  }
}

// Rounds a group to -8..7, and returns what one is worth. The largest magnitude becomes -8, for that end has one more.
template <typename T>
BFloat16 round_group(const T* from, int8_t* to) {
  std::memset(to, 0, kGroup);
  BFloat16 scale{0};
  float largest = 0.0f;
  bool is_finite = true;
  for (int idx = 0; idx < kGroup; ++idx) {
    const float value = widen(from[idx]);
    if (std::abs(value) > std::abs(largest)) largest = value;
    is_finite = is_finite && std::abs(value) < kInfinity;
  }
  if (is_finite && std::abs(largest) < kSmallest) return scale;
  narrow(&scale, is_finite ? largest / -8.0f : kNaN);
  const float step = widen(scale);
  if (std::abs(step) < kInfinity)
    for (int idx = 0; idx < kGroup; ++idx)
      to[idx] = int8_t(std::min(std::max(nearest(splat(widen(from[idx]) / step))[0], -8), 7));
  return scale;
}

}  // namespace

// The bytes of a packed weight; `width` is a multiple of 32.
QUIRE_EXPORT int64_t quire_bytes_int4(int64_t num_columns, int64_t width) {
  return num_panels(int(num_columns)) * (width / kGroup) * kGroupBytes;
}

// Rounds and packs a weight [num_columns, width].
QUIRE_EXPORT void quire_pack_int4(int64_t type, const void* weight, int64_t num_columns, int64_t width, void* packed) {
  with_type(Type(type), [&](auto* null) {
    const auto* from = static_cast<const std::remove_pointer_t<decltype(null)>*>(weight);
    const int64_t num_groups = width / kGroup;
    quire::in_parallel(num_panels(int(num_columns)), 1, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        const int count = int(std::min<int64_t>(kPanel, num_columns - panel * kPanel));
        // What the padding holds reaches sums that nobody looks at.
        for (int column = 0; column < count; ++column) {
          for (int64_t group = 0; group < num_groups; ++group) {
            uint8_t* to = static_cast<uint8_t*>(packed) + (panel * num_groups + group) * kGroupBytes;
            int8_t values[kGroup];
            reinterpret_cast<BFloat16*>(to)[column] =
                round_group(from + (panel * kPanel + column) * width + group * kGroup, values);
            to += kPanel * sizeof(BFloat16) + column * kStepBytes;
            for (int idx = 0; idx < kGroup; idx += 2 * kStepBytes, to += kPairBytes)
              for (int byte = 0; byte < kStepBytes; ++byte)
                to[byte] = uint8_t((values[idx + byte] + kNibbleOffset) |
                                   (values[idx + kStepBytes + byte] + kNibbleOffset) << 4);
          }
        }
      }
    });
  });
}

// Multiplies rows [num_rows, width] by a packed weight; bias and residual may be null.
QUIRE_EXPORT void quire_linear_int4(int64_t type, const void* x, int64_t row_stride, int64_t num_rows,
                                    const void* packed, int64_t num_columns, int64_t width, const void* bias,
                                    const void* residual, void* output) {
  with_type(Type(type), [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const Operands operands{x, row_stride, bias, residual, output, int(num_columns)};
    const int num_groups = int(width / kGroup);
    const ByteRows rows(static_cast<const T*>(x), row_stride, num_rows, int(width), num_groups, kNibbleOffset);
    const int64_t panel_bytes = int64_t(num_groups) * kGroupBytes;
    in_blocks<kPanel>(operands.num_columns, num_rows, [&](int panel, int64_t first, int count) {
      const uint8_t* groups = static_cast<const uint8_t*>(packed) + panel * panel_bytes;
      multiply_rows<T>(rows, groups, operands, panel, first, count);
    });
  });
}
