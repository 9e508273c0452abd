// Products of small matrices in the CPU's cache: C = diag(scale) C + A B, with A row by row and B in panels.
//
// A product consists of steps: one float each, or a pair of bfloat16 where the instruction set multiplies and adds
// pairs. All panels of B, the last one included, are [depth, kPanel] steps.
#pragma once

#include <type_traits>

#include "vec.h"

namespace {

// Rows and vectors of C that stay in registers.
constexpr int kTileRows = 6;
constexpr int kTileVectors = kRegisters / 8;
constexpr int kPanel = kTileVectors * kLanes;

constexpr int round_up(int count, int unit) { return (count + unit - 1) / unit * unit; }

struct SingleFloats {
  using Value = float;
  static constexpr int kValues = 1;  // values per step

  static QUIRE_INLINE Floats broadcast(const float* step) { return splat(*step); }
  static QUIRE_INLINE void store_step(float* to, const Floats* values) { store(to, values[0]); }
  static QUIRE_INLINE void multiply_add(Floats& sum, Floats a, Floats b) { sum += a * b; }
};

#if defined(__AVX512BF16__)
struct BFloat16Pairs {
  using Value = BFloat16;
  static constexpr int kValues = 2;

  static QUIRE_INLINE Floats broadcast(const BFloat16* step) {
    return bit_cast<Floats>(Words{} + load_bits<uint32_t>(step));
  }
  static QUIRE_INLINE void store_step(BFloat16* to, const Floats* values) {
    store_bits(to, pairs_of(values[0], values[1]));
  }
  static QUIRE_INLINE void multiply_add(Floats& sum, Floats a, Floats b) {
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b));
  }
};
#endif

// Type of the steps for values of the cache's type.
template <typename T>
struct StepsOf {
  using Type = SingleFloats;
};
#if defined(__AVX512BF16__)
template <>
struct StepsOf<BFloat16> {
  using Type = BFloat16Pairs;
};
#endif

// Loads consecutive steps of a key, one per lane.
template <typename Steps, typename T>
QUIRE_INLINE Words load_steps(const T* key) {
  if constexpr (Steps::kValues == 2) {
    return bit_cast<Words>(load_halves(key));
  } else {
    return bit_cast<Words>(load(key));
  }
}

// A panel whose steps are stored as they are multiplied.
template <typename Steps>
struct PanelSteps {
  const typename Steps::Value* data;

  template <int kVectors>
  QUIRE_INLINE void take(int step, Floats (&columns)[kVectors]) const {
#pragma GCC unroll 4
    for (int vector = 0; vector < kVectors; ++vector)
      columns[vector] = load_bits<Floats>(data + (step * kPanel + vector * kLanes) * Steps::kValues);
  }
};

struct NoPrefetch {
  QUIRE_INLINE void step() {}
};

// Rows of A, one after the other.
template <typename Steps>
struct StridedRows {
  const typename Steps::Value* data;
  int stride;  // number of values from row to row

  QUIRE_INLINE Floats at(int row, int step) const {
    return Steps::broadcast(data + row * stride + step * Steps::kValues);
  }
};

// Rows of A, side by side in each step.
template <typename Steps>
struct ContiguousRows {
  const typename Steps::Value* data;
  int stride;  // number of values from step to step

  QUIRE_INLINE Floats at(int row, int step) const {
    return Steps::broadcast(data + step * stride + row * Steps::kValues);
  }
};

// Rows of A at arbitrary addresses.
template <typename Steps, int kRows>
struct GatheredRows {
  const typename Steps::Value* rows[kRows];

  QUIRE_INLINE Floats at(int row, int step) const { return Steps::broadcast(rows[row] + step * Steps::kValues); }
};

// Computes a tile of C. Without `scale`, C's old values count as zeros and are not read.
//
// a: `at(row, step)` returns a step of a row, in every lane.
// panel: `take(step, columns)` loads vectors of columns of a step.
// ahead: prefetches later data at each step.
template <typename Steps, int kRows, int kVectors, typename Rows, typename Panel, typename PanelPrefetch = NoPrefetch>
void multiply_tile(const Rows& a, const Panel& panel, int depth, float* c, int c_stride, const float* scale,
                   PanelPrefetch ahead = {}) {
  Floats sums[kRows][kVectors];
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < kVectors; ++vector)
      sums[row][vector] = scale ? load(c + row * c_stride + vector * kLanes) * scale[row] : Floats{};
  for (int step = 0; step < depth; ++step) {
    Floats columns[kVectors];
    panel.take(step, columns);
    ahead.step();
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const Floats value = a.at(row, step);
#pragma GCC unroll 4
      for (int vector = 0; vector < kVectors; ++vector) Steps::multiply_add(sums[row][vector], value, columns[vector]);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < kVectors; ++vector) store(c + row * c_stride + vector * kLanes, sums[row][vector]);
}

// Calls `body` with a number from 1 to `kMost` as a constant.
template <int kMost, typename Body>
QUIRE_INLINE void with_count(int count, Body body) {
  if constexpr (kMost > 1) {
    if (count < kMost) return with_count<kMost - 1>(count, body);
  }
  body(std::integral_constant<int, kMost>());
}

// Calls `tile(first row, number of rows)` for the rows [0, num_rows) in tiles; the number of rows is a constant.
template <int kRows, typename Tile>
QUIRE_INLINE void in_tiles(int num_rows, Tile tile) {
  int row = 0;
  for (; num_rows - row >= kRows; row += kRows) tile(row, std::integral_constant<int, kRows>());
  if constexpr (kRows > 1) {
    if (num_rows > row) in_tiles<kRows - 1>(num_rows - row, [&](int idx, auto count) { tile(row + idx, count); });
  }
}

// The same in tiles of about the same size, at most `kRows` rows: small tiles leave arithmetic units idle.
template <int kRows, typename Tile>
QUIRE_INLINE void in_even_tiles(int num_rows, Tile tile) {
  for (int row = 0, left = (num_rows + kRows - 1) / kRows; left > 0; --left) {
    const int count = (num_rows - row + left - 1) / left;
    with_count<kRows>(count, [&](auto rows) { tile(row, rows); });
    row += count;
  }
}

template <typename Steps, int kVectors>
void multiply_panel(const typename Steps::Value* a, int a_stride, const typename Steps::Value* panel, int depth,
                    float* c, int c_stride, const float* scale, int num_rows) {
  in_tiles<kTileRows>(num_rows, [&](int row, auto rows) {
    multiply_tile<Steps, rows.value, kVectors>(StridedRows<Steps>{a + row * a_stride, a_stride},
                                               PanelSteps<Steps>{panel}, depth, c + row * c_stride, c_stride,
                                               scale ? scale + row : nullptr);
  });
}

// C[num_rows, num_columns] = diag(scale) C + A B.
//
// a: [num_rows, depth] steps, `a_stride` values from row to row.
// b: panels; their contents past `num_columns` only reach C's padding.
// c: [num_rows, c_stride] floats; a row has room for `num_columns` rounded up to whole vectors.
// scale: [num_rows], or null: C's old values are not read.
template <typename Steps>
void multiply(const typename Steps::Value* a, int a_stride, const typename Steps::Value* b, int depth, float* c,
              int c_stride, const float* scale, int num_rows, int num_columns) {
  for (int column = 0; column < num_columns; column += kPanel) {
    const int num_vectors = (num_columns - column + kLanes - 1) / kLanes;
    if (num_vectors >= kTileVectors) {
      multiply_panel<Steps, kTileVectors>(a, a_stride, b, depth, c, c_stride, scale, num_rows);
    } else if (num_vectors == 1) {
      multiply_panel<Steps, 1>(a, a_stride, b, depth, c, c_stride, scale, num_rows);
    } else if constexpr (kTileVectors > 2) {
      if (num_vectors == 2) {
        multiply_panel<Steps, 2>(a, a_stride, b, depth, c, c_stride, scale, num_rows);
      } else {
        multiply_panel<Steps, 3>(a, a_stride, b, depth, c, c_stride, scale, num_rows);
      }
    }
    b += kPanel * depth * Steps::kValues;
    c += kPanel;
  }
}

}  // namespace
