// Linear layers whose weights are widened to floats as they are loaded: in registers for few rows and for tiles of rows
// of bfloat16, for more rows of float16 in a piece by which all rows of a job are multiplied.
#pragma once

#include <memory>

#include "linear.h"

namespace {

constexpr int kWidenedSteps = 256;  // steps of a piece that is widened for many rows: 16 KiB of each of its panels
constexpr int kDirectSteps = 64;    // steps of a piece whose columns are processed in turns: 8 KiB
constexpr int kUnpackedRows = 32;   // maximum number of rows of bfloat16 whose tiles widen weights on their own
constexpr int kColumnGroup = 32;    // unit of columns that are widened at once where weights may be compressed

// Layout of two vectors of columns in memory, and their conversion.
template <typename T>
struct ColumnPair {
  static QUIRE_INLINE void load_both(const T* from, Floats& low, Floats& high) {
    low = load(from);
    high = load(from + kLanes);
  }
  // words: a column of the first vector in the low halves, one of the second in the high halves.
  static QUIRE_INLINE void store_both(T* to, Words words) {
    store_bits(to, __builtin_convertvector(words, Halves));
    store_bits(to + kLanes, __builtin_convertvector(words >> 16, Halves));
  }
  // Returns the index of a column of the two in memory.
  static int place_of(int column) { return column; }
};

// Columns of the two vectors alternate, so that a shift and a mask widen them.
template <>
struct ColumnPair<BFloat16> {
  static QUIRE_INLINE void widen_both(Words words, Floats& low, Floats& high) {
    low = bit_cast<Floats>(words << 16);
    high = bit_cast<Floats>(words & 0xffff0000u);
  }
  static QUIRE_INLINE void load_both(const BFloat16* from, Floats& low, Floats& high) {
    widen_both(load_bits<Words>(from), low, high);
  }
  static QUIRE_INLINE void store_both(BFloat16* to, Words words) { store_bits(to, words); }
  static int place_of(int column) { return column % kLanes * 2 + column / kLanes; }
};

// Packs the columns [num_columns, width] of a panel; the padding repeats the last column, and its sums are not read.
//
// columns: address of each column. panel: [width, kWeightPanel].
template <typename T>
void pack_pairs(const T* const* columns, int count, int width, T* panel) {
  const auto column_at = [&](int column) { return columns[std::min(column, count - 1)]; };
  // Returns the next steps of a column, one per word.
  const auto steps_of = [](const T* from, int num_steps) {
    if (num_steps == kLanes) return __builtin_convertvector(load_bits<Halves>(from), Words);
    Words steps{};
    for (int lane = 0; lane < num_steps; ++lane) steps[lane] = from[lane].bits;
    return steps;
  };
  for (int step = 0; step < width; step += kLanes) {
    const int num_steps = std::min(kLanes, width - step);
    for (int column = 0; column < kWeightPanel; column += 2 * kLanes) {
      Words square[kLanes];
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes; ++lane)
        square[lane] = steps_of(column_at(column + lane) + step, num_steps) |
                       steps_of(column_at(column + kLanes + lane) + step, num_steps) << 16;
      transpose(square);
      for (int lane = 0; lane < num_steps; ++lane)
        ColumnPair<T>::store_both(panel + (step + lane) * kWeightPanel + column, square[lane]);
    }
  }
}

// Remaining steps of a panel, stored as they were packed.
template <typename T>
struct PlainPanel {
  static constexpr int kPieceSteps = kDirectSteps;
  static constexpr int kUnpackedSteps = 128;  // steps by which many rows are multiplied at once: 16 KiB
  static constexpr int kDirectRows = std::is_same_v<T, BFloat16> ? 2 : 3;  // rows for `multiply_few`

  const T* columns;

  // Calls `body` with the next steps, at most a piece, and advances past them.
  template <typename Body>
  QUIRE_INLINE void take(int depth, Body body) {
    body(*this);
    columns += depth * kWeightPanel;
  }

  // Returns the next steps, and advances past them. `num_ahead`: number of bytes behind them that are read next.
  const T* unpack(int depth, T*, const uint8_t*& ahead, int& num_ahead) {
    const T* const from = columns;
    columns += depth * kWeightPanel;
    ahead = reinterpret_cast<const uint8_t*>(columns);
    num_ahead = depth * kWeightPanel * int(sizeof(T));
    return from;
  }

  // Widens vectors of columns of a step, and prefetches those of `kAhead` steps later if these are a part of the panel.
  template <int kAhead, int kVectors>
  QUIRE_INLINE void widen(int step, int column, Floats (&values)[kVectors]) const {
    const T* from = columns + step * kWeightPanel + column;
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; vector += 2) {
      ColumnPair<T>::load_both(from + vector * kLanes, values[vector], values[vector + 1]);
      // A panel that is read front to back is prefetched by the hardware.
      if (kVectors * kLanes < kWeightPanel && vector * kLanes % (64 / int(sizeof(T))) == 0)
        fetch(from + kAhead * kWeightPanel + vector * kLanes);
    }
  }
};

// Multiplies rows by vectors of columns as they are widened: sums[row, column] += x[row, step] w[step, column].
template <int kRows, int kVectors, typename Steps>
void multiply_directly(const float* x, int64_t width, const Steps& steps, int column, int depth, float* sums) {
  Floats totals[kRows][kVectors];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector)
      totals[row][vector] = load(sums + row * kWeightPanel + vector * kLanes);
  for (int step = 0; step < depth; ++step) {
    Floats values[kVectors];
    steps.template widen<kDirectSteps>(step, column, values);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const Floats value = splat(x[row * width + step]);
#pragma GCC unroll 8
      for (int vector = 0; vector < kVectors; ++vector) totals[row][vector] += value * values[vector];
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector)
      store(sums + row * kWeightPanel + vector * kLanes, totals[row][vector]);
}

// For few rows; the registers for the sums limit the number of columns at once.
template <int kRows, typename Panel>
void multiply_few(const float* x, Panel panel, int width, float* sums) {
  constexpr int vectors = kWeightPanel / kLanes, most = kRows == 1 ? 8 : 4;
  constexpr int at_once = vectors < most ? vectors : most;
  for (int step = 0; step < width; step += Panel::kPieceSteps) {
    const int depth = std::min(Panel::kPieceSteps, width - step);
    panel.take(depth, [&](const auto& steps) {
      for (int column = 0; column < kWeightPanel; column += at_once * kLanes)
        multiply_directly<kRows, at_once>(x + step, width, steps, column, depth, sums + column);
    });
  }
}

// For many rows: a piece of the panel is widened into panels of the tiles' width.
template <typename Panel>
void multiply_many(const float* x, Panel panel, int width, float* sums, int num_rows) {
  thread_local std::unique_ptr<float[]> scratch(new float[kWidenedSteps * kWeightPanel + 16]);
  float* widened = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch.get()) + 63) & ~uintptr_t(63));
  float ones[kJobRows];
  std::fill_n(ones, num_rows, 1.0f);
  constexpr int at_once = kColumnGroup / kLanes;
  for (int start = 0; start < width; start += kWidenedSteps) {
    const int depth = std::min(kWidenedSteps, width - start);
    for (int begin = 0; begin < depth; begin += Panel::kPieceSteps) {
      const int count = std::min(Panel::kPieceSteps, depth - begin);
      panel.take(count, [&](const auto& steps) {
        for (int step = 0; step < count; ++step) {
          for (int first = 0; first < kWeightPanel; first += at_once * kLanes) {
            Floats values[at_once];
            steps.template widen<kWidenedSteps>(step, first, values);
#pragma GCC unroll 8
            for (int vector = 0; vector < at_once; ++vector) {
              const int column = first + vector * kLanes;
              store(widened + column / kPanel * kPanel * depth + (begin + step) * kPanel + column % kPanel,
                    values[vector]);
            }
          }
        }
      });
    }
    multiply<SingleFloats>(x + start, width, widened, depth, sums, kWeightPanel, ones, num_rows, kWeightPanel);
  }
}

// Columns of steps as they are packed, widened as they are loaded.
template <typename T>
struct PackedColumns {
  const T* data;

  template <int kVectors>
  QUIRE_INLINE void take(int step, Floats (&columns)[kVectors]) const {
#pragma GCC unroll 4
    for (int vector = 0; vector < kVectors; vector += 2)
      ColumnPair<T>::load_both(data + step * kWeightPanel + vector * kLanes, columns[vector], columns[vector + 1]);
  }
};

// For many rows of bfloat16. A shift and a mask for each tile of rows cost less than floats that are stored and loaded
// again, which take twice the cache.
template <typename Panel>
void multiply_unpacked(const float* x, Panel panel, int width, float* sums, int num_rows) {
  alignas(64) constexpr float kOnes[kTileRows] = {1, 1, 1, 1, 1, 1};
  alignas(64) BFloat16 buffer[Panel::kUnpackedSteps * kWeightPanel];
  for (int start = 0; start < width; start += Panel::kUnpackedSteps) {
    const int depth = std::min(Panel::kUnpackedSteps, width - start);
    const uint8_t* next;
    int num_ahead;
    const BFloat16* from = panel.unpack(depth, buffer, next, num_ahead);
    num_ahead /= kWeightPanel / kPanel;
    for (int column = 0; column < kWeightPanel; column += kPanel, next += num_ahead)
      in_even_tiles<kTileRows>(num_rows, [&](int row, auto count) {
        const PanelPrefetch ahead(next, num_ahead, depth, row, count.value, num_rows);
        const StridedRows<SingleFloats> rows{x + int64_t(row) * width + start, width};
        multiply_tile<SingleFloats, count.value, kTileVectors>(rows, PackedColumns<BFloat16>{from + column}, depth,
                                                               sums + row * kWeightPanel + column, kWeightPanel, kOnes,
                                                               ahead);
      });
  }
}

// Multiplies rows by a weight of type `T`; `panel_at(panel)` returns one of its panels.
template <typename T, typename PanelAt>
void multiply_widened(const Operands& operands, int64_t num_rows, int64_t num_columns, int width, PanelAt panel_at) {
  // The values of x are needed for each panel, so they are widened once.
  const std::unique_ptr<float[]> rows(new float[num_rows * width]);
  widen_rows(static_cast<const T*>(operands.x), operands.row_stride, num_rows, width, rows.get());
  in_blocks(num_columns, num_rows, [&](int64_t panel, int64_t first, int count) {
    alignas(64) float sums[kJobRows * kWeightPanel];
    std::fill_n(sums, count * kWeightPanel, 0.0f);
    const float* x = &rows[first * width];
    constexpr int kDirectRows = decltype(panel_at(panel))::kDirectRows;
    switch (count) {
      case 1: multiply_few<1>(x, panel_at(panel), width, sums); break;
      case 2: multiply_few<2>(x, panel_at(panel), width, sums); break;
      default:
        if (count <= kDirectRows) {
          multiply_few<kDirectRows>(x, panel_at(panel), width, sums);
          break;
        }
        if constexpr (std::is_same_v<T, BFloat16>) {
          if (count <= kUnpackedRows) {
            multiply_unpacked(x, panel_at(panel), width, sums, count);
            break;
          }
        }
        multiply_many(x, panel_at(panel), width, sums, count);
    }
    finish_rows<T>(operands, panel, first, count, sums);
  });
}

template <typename T>
struct WidenedWeight {
  using Value = T;

  static void pack(const T* const* columns, int count, int width, T* panel) {
    pack_pairs(columns, count, width, panel);
  }

  // Number of adjacent values of a column in a step, and their index in the step.
  static constexpr int kStepValues = 1;
  static int place_of(int column) {
    constexpr int both = 2 * kLanes;
    return column / both * both + ColumnPair<T>::place_of(column % both);
  }

  static void multiply(const Operands& operands, int64_t num_rows, const T* packed, int64_t num_columns, int width) {
    multiply_widened<T>(operands, num_rows, num_columns, width,
                        [=](int64_t panel) { return PlainPanel<T>{packed + panel * width * kWeightPanel}; });
  }
};

}  // namespace
