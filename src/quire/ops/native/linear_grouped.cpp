// Linear layers on weights of four or six bits, one bfloat16 scale for each group of 32 inputs, and rows of int8.
//
// Within a group sums are whole numbers and exact. Groups are added up one after the other in float32, whatever rows
// are there: a row gets the same bits in every batch.
#include <cmath>

#include "bytes.h"

namespace {

constexpr int kGroup = 32;
constexpr int kGroupSteps = kGroup / kStepBytes;
constexpr int kGroupPairs = kGroupSteps / 2;

// Added to weights, which makes them positive.
template <int kBits>
constexpr int kOffset = 1 << (kBits - 1);

// A group of a panel: [kPanel] scales; for each pair of steps [kPanel] of their lower four bits, those of the second in
// the upper halves of bytes; and of six bits the upper two, [kPanel] for each two pairs. The first step has them where
// they are wanted, in bits 4 and 5 of its bytes, the second in 6 and 7, the third in 0 and 1, the fourth in 2 and 3.
constexpr int kPairBytes = kPanel * kStepBytes;
constexpr int kTops = kPanel * int(sizeof(BFloat16)) + kGroupPairs * kPairBytes;
template <int kBits>
constexpr int kGroupBytes = kTops + (kBits == 6 ? kGroupPairs / 2 * kPairBytes : 0);

// Rows of a tile: their sums of a group and those of all groups stay in registers.
constexpr int kGroupRows = 3;

// Sums of a group's products, from what they start with to a whole number.
template <int kBits>
struct Sums {
  using Sum = Ints;

  static QUIRE_INLINE Sum first(int32_t start) { return Ints{} + start; }
  static QUIRE_INLINE void add(Sum& sum, Ints weights, Ints values) { multiply_add(sum, weights, values); }
  static QUIRE_INLINE Ints total(Sum sum, int32_t) { return sum; }
};

#if QUIRE_LANES == 8 || (defined(__AVX512BW__) && !defined(__AVX512VNNI__))

// Products of four bits are so small that those of a whole group fit in 16: 8 steps of pairs of 15 * 127.
template <>
struct Sums<4> {
  using Sum = Shorts;

  static QUIRE_INLINE Sum first(int32_t) { return Shorts{}; }

  static QUIRE_INLINE void add(Sum& sum, Ints weights, Ints values) {
#if QUIRE_LANES == 8
    sum += (Shorts)_mm256_maddubs_epi16((__m256i)weights, (__m256i)values);
#else
    sum += (Shorts)_mm512_maddubs_epi16((__m512i)weights, (__m512i)values);
#endif
  }

  static QUIRE_INLINE Ints total(Sum sum, int32_t start) {
#if QUIRE_LANES == 8
    return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)) + start;
#else
    return (Ints)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1)) + start;
#endif
  }
};

#endif

// The weights of a pair's two steps, in the lanes of a vector.
template <int kBits>
QUIRE_INLINE void unpack_pair(const uint8_t* group, int pair, int vector, Ints& first, Ints& second) {
  constexpr int32_t kLow = 0x0f0f0f0f, kTop = 0x30303030;
  const int at = vector * kLanes * kStepBytes;
  const Ints both = load_bits<Ints>(group + kPanel * sizeof(BFloat16) + pair * kPairBytes + at);
  first = both & kLow;
  second = (both >> 4) & kLow;
  if constexpr (kBits == 6) {
    const Ints tops = load_bits<Ints>(group + kTops + pair / 2 * kPairBytes + at) << (pair % 2 * 4);
    first |= tops & kTop;
    second |= (tops >> 2) & kTop;
  }
}

// Unpacks groups to bytes, [groups, kGroupSteps, kPanel] steps.
template <int kBits>
void unpack_groups(const uint8_t* groups, int num_groups, uint8_t* steps) {
  for (int group = 0; group < num_groups; ++group, groups += kGroupBytes<kBits>)
    for (int pair = 0; pair < kGroupPairs; ++pair, steps += 2 * kPairBytes)
#pragma GCC unroll 4
      for (int vector = 0; vector < kTileVectors; ++vector) {
        Ints first, second;
        unpack_pair<kBits>(groups, pair, vector, first, second);
        store_bits(steps + vector * kLanes * kStepBytes, first);
        store_bits(steps + kPairBytes + vector * kLanes * kStepBytes, second);
      }
}

// Adds the products of some groups to the sums [rows, kPanel].
//
// starts: [rows, all groups of a row].
// unpacked: the groups' weights as bytes, if they are to be taken from there.
// ahead: what is fetched meanwhile.
template <int kBits, int kRows, bool kIsUnpacked>
void multiply_groups(const int8_t* x, int width, const int32_t* starts, const uint8_t* groups, const uint8_t* unpacked,
                     int num_groups, Ahead ahead, float* sums) {
  const int all_groups = width / kGroup;
  Floats totals[kRows][kTileVectors];
#pragma GCC unroll 3
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector) totals[row][vector] = load(sums + row * kPanel + vector * kLanes);
  for (int group = 0; group < num_groups; ++group) {
    const uint8_t* from = groups + group * kGroupBytes<kBits>;
    const auto* scales = reinterpret_cast<const BFloat16*>(from);
    const int8_t* values = x + group * kGroup;
    typename Sums<kBits>::Sum products[kRows][kTileVectors];
#pragma GCC unroll 3
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int vector = 0; vector < kTileVectors; ++vector)
        products[row][vector] = Sums<kBits>::first(starts[row * all_groups + group]);
#pragma GCC unroll 1  // else the compiler adds up a group's products in an order that takes more registers than there are
    for (int pair = 0; pair < kGroupPairs; ++pair) {
      Ints weights[2][kTileVectors];  // of both steps
#pragma GCC unroll 4
      for (int vector = 0; vector < kTileVectors; ++vector) {
        if constexpr (kIsUnpacked) {
          const uint8_t* steps = unpacked + (group * kGroupSteps + 2 * pair) * kPairBytes + vector * kLanes * kStepBytes;
          weights[0][vector] = load_bits<Ints>(steps);
          weights[1][vector] = load_bits<Ints>(steps + kPairBytes);
        } else {
          unpack_pair<kBits>(from, pair, vector, weights[0][vector], weights[1][vector]);
        }
      }
      ahead.step();
#pragma GCC unroll 3
      for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
        for (int step = 0; step < 2; ++step) {
          const Ints value = broadcast(values + row * width + (2 * pair + step) * kStepBytes);
#pragma GCC unroll 4
          for (int vector = 0; vector < kTileVectors; ++vector)
            Sums<kBits>::add(products[row][vector], weights[step][vector], value);
        }
      }
    }
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector) {
      const Floats scale = load(scales + vector * kLanes);
#pragma GCC unroll 3
      for (int row = 0; row < kRows; ++row) {
        const Ints total = Sums<kBits>::total(products[row][vector], starts[row * all_groups + group]);
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
//
// kIsUnpacked: to unpack six bits costs a tile more than its products do; for several tiles bytes are made of them once.
template <int kBits, bool kIsUnpacked, typename T>
void multiply_rows(const ByteRows& rows, const uint8_t* groups, const Operands& operands, int panel, int64_t first,
                   int num_rows) {
  constexpr int kUnpackedGroups = 8;
  alignas(64) float sums[kJobRows * kPanel];
  alignas(64) uint8_t unpacked[kIsUnpacked ? kUnpackedGroups * kGroupSteps * kPairBytes : 1];
  std::fill_n(sums, num_rows * kPanel, 0.0f);
  const int8_t* x = rows.values.get() + first * rows.width;
  const int32_t* starts = rows.starts.get() + first * rows.num_groups;
  // Half the bytes a step: twice the steps of a piece.
  const int piece =
      kIsUnpacked ? kUnpackedGroups : 2 * (num_rows <= kFewPieceRows ? kPieceSteps : kLongPieceSteps) / kGroupSteps;
  for (int group = 0; group < rows.num_groups; group += piece) {
    const int count = std::min(piece, rows.num_groups - group), num_bytes = count * kGroupBytes<kBits>;
    const uint8_t* from = groups + group * kGroupBytes<kBits>;
    if constexpr (kIsUnpacked) unpack_groups<kBits>(from, count, unpacked);
    in_tiles<kGroupRows>(num_rows, [&](int row, auto tile_rows) {
      const Ahead ahead(from + num_bytes, num_bytes, count * kGroupPairs, row, tile_rows.value, num_rows);
      multiply_groups<kBits, tile_rows.value, kIsUnpacked>(
          x + row * rows.width + group * kGroup, rows.width, starts + row * rows.num_groups + group, from, unpacked, count,
          ahead, sums + row * kPanel);
    });
  }
  for (int row = 0; row < num_rows; ++row) {
    float* products = sums + row * kPanel;
    for (int column = 0; column < kPanel; column += kLanes)
      store(products + column, load(products + column) * rows.scales[first + row]);
    finish<T>(products, operands, first + row, panel);
  }
}

// Rounds a group to -8..7 or -32..31, and returns what one is worth. The largest magnitude becomes the lowest, for that
// end has one more.
template <int kBits, typename T>
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
  narrow(&scale, is_finite ? largest / -float(kOffset<kBits>) : kNaN);
  const float step = widen(scale);
  if (std::abs(step) < kInfinity)
    for (int idx = 0; idx < kGroup; ++idx)
      to[idx] = int8_t(std::min(std::max(nearest(splat(widen(from[idx]) / step))[0], -kOffset<kBits>), kOffset<kBits> - 1));
  return scale;
}

// Puts a group's weights, with their offset, to a column of its panel.
template <int kBits>
void pack_group(const int8_t* values, uint8_t* pairs, uint8_t* tops) {
  for (int step = 0; step < kGroupSteps; ++step) {
    for (int byte = 0; byte < kStepBytes; ++byte) {
      const int value = values[step * kStepBytes + byte] + kOffset<kBits>;
      uint8_t& low = pairs[step / 2 * kPairBytes + byte];
      low = uint8_t(step % 2 ? low | value << 4 : value & 15);
      if constexpr (kBits == 6) {
        uint8_t& top = tops[step / 4 * kPairBytes + byte];
        top = uint8_t((step % 4 ? top : 0) | (value >> 4) << (4 + 2 * step) % 8);
      }
    }
  }
}

template <int kBits>
int64_t panel_bytes(int64_t width) {
  return width / kGroup * kGroupBytes<kBits>;
}

template <int kBits>
void pack(Type type, const void* weight, int64_t num_columns, int64_t width, bool is_gated, void* packed) {
  with_type(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const auto* from = static_cast<const T*>(weight);
    quire::in_parallel(num_panels(int(num_columns)), 1, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        const int count = int(std::min<int64_t>(kPanel, num_columns - panel * kPanel));
        // What the padding holds reaches sums that nobody looks at.
        for (int column = 0; column < count; ++column) {
          const T* row = from + column_of<kPanel>(panel, column, num_columns, is_gated) * width;
          uint8_t* to = static_cast<uint8_t*>(packed) + panel * panel_bytes<kBits>(width);
          for (int64_t idx = 0; idx < width; idx += kGroup, to += kGroupBytes<kBits>) {
            int8_t values[kGroup];
            reinterpret_cast<BFloat16*>(to)[column] = round_group<kBits>(row + idx, values);
            pack_group<kBits>(values, to + kPanel * sizeof(BFloat16) + column * kStepBytes,
                              to + kTops + column * kStepBytes);
          }
        }
      }
    });
  });
}

template <int kBits>
void multiply(Type type, const void* x, int64_t row_stride, int64_t num_rows, const void* packed, int64_t num_columns,
              int64_t width, const void* bias, const void* residual, Activation gate, void* output) {
  with_type(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const Operands operands{x, row_stride, bias, residual, output, int(num_columns), gate};
    const ByteRows rows(static_cast<const T*>(x), row_stride, num_rows, int(width), int(width / kGroup), kOffset<kBits>);
    in_blocks<kPanel>(operands.num_columns, num_rows, [&](int panel, int64_t first, int count) {
      const uint8_t* groups = static_cast<const uint8_t*>(packed) + panel * panel_bytes<kBits>(width);
      if (kBits == 6 && count > 2 * kGroupRows)
        multiply_rows<kBits, true, T>(rows, groups, operands, panel, first, count);
      else
        multiply_rows<kBits, false, T>(rows, groups, operands, panel, first, count);
    });
  });
}

}  // namespace

// For four bits, and for six: the bytes of a packed weight, `width` a multiple of 32; what rounds and packs a weight
// [num_columns, width]; and what multiplies rows [num_rows, width] by it, where bias and residual may be null.
#define QUIRE_GROUPED(name, kBits)                                                                                      \
  QUIRE_EXPORT int64_t quire_bytes_##name(int64_t num_columns, int64_t width) {                                        \
    return num_panels(int(num_columns)) * panel_bytes<kBits>(width);                                                   \
  }                                                                                                                    \
  QUIRE_EXPORT void quire_pack_##name(int64_t type, const void* weight, int64_t num_columns, int64_t width,            \
                                      bool is_gated, void* packed) {                                                   \
    pack<kBits>(Type(type), weight, num_columns, width, is_gated, packed);                                             \
  }                                                                                                                    \
  QUIRE_EXPORT void quire_linear_##name(Type type, const void* x, int64_t row_stride, int64_t num_rows,                \
                                        const void* packed, int64_t num_columns, int64_t width, const void* bias,      \
                                        const void* residual, Activation gate, void* output) {                         \
    multiply<kBits>(type, x, row_stride, num_rows, packed, num_columns, width, bias, residual, gate, output);          \
  }

QUIRE_GROUPED(int4, 4)
QUIRE_GROUPED(int6, 6)
