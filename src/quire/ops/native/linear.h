// Common parts of linear layers, for all formats of weights: y = x W^T + bias + residual.
//
// A panel of output columns is read from memory front to back, a piece at a time; a piece stays in the first-level
// cache while all rows are multiplied by it, and the next one is prefetched meanwhile. The bytes of the weight limit
// the speed for one row, arithmetic for many rows, and both for numbers between. Each output is the same sum in the
// same order whichever other rows there are: a row gets the same bits in every batch.
#pragma once

#include <algorithm>

#include "activation_functions.h"
#include "cache.h"
#include "parallel.h"
#include "tiles.h"

namespace {

constexpr int kJobRows = 96;  // maximum number of rows of a job; whole tiles
// Number of steps of a piece of a panel. For few rows it fits the first-level cache (16 KiB where steps are multiplied
// by AVX-512); for many, the second level suffices, and sums are stored and loaded less often.
constexpr int kPieceSteps = 64;
constexpr int kLongPieceSteps = 256;
constexpr int kFewPieceRows = 16;

// Returns the number of panels of `kColumns` columns of a weight.
template <int kColumns = kPanel>
constexpr int num_panels(int64_t num_columns) {
  return int((num_columns + kColumns - 1) / kColumns);
}

// Returns the column of a weight at a column of a panel. The first half of a gated weight's panel holds gates, the
// second half the columns that these are multiplied with, which come from the second half of the weight.
template <int kColumns>
constexpr int64_t column_of(int64_t panel, int column, int64_t num_columns, bool is_gated) {
  constexpr int kHalf = kColumns / 2;
  if (!is_gated) return panel * kColumns + column;
  return panel * kHalf + (column < kHalf ? column : num_columns / 2 + column - kHalf);
}

struct Operands {
  const void* x;  // [rows, width]
  int64_t row_stride;
  const void* bias;      // [columns], or null
  const void* residual;  // [rows, columns], or null
  void* output;          // [rows, columns], or [rows, columns / 2] if gated
  int num_columns;
  Activation gate;  // applied to the first half of the columns, which is multiplied with the second
  int64_t row_columns = 0;  // columns from row to row of residual and output if these are part of wider ones, else 0
};

// Gates a row's sums of one panel, with the roundings of sums that are first stored to memory.
template <typename Form, typename T, int kColumns>
void finish_gated(float* sums, const Operands& operands, int64_t row, int panel) {
  constexpr int kHalf = kColumns / 2;
  static_assert(kHalf % kLanes == 0);
  const int width = operands.num_columns / 2;
  const T* addends[2] = {static_cast<const T*>(operands.bias), static_cast<const T*>(operands.residual)};
  if (addends[1] != nullptr) addends[1] += row * operands.num_columns;
  T* to = static_cast<T*>(operands.output) + row * width + panel * kHalf;
  for (int column = 0; column < kHalf; column += kLanes) {
    Floats gate = load(sums + column), up = load(sums + kHalf + column);
    for (const T* addend : addends) {
      if (addend == nullptr) continue;
      gate += load(addend + panel * kHalf + column);
      up += load(addend + width + panel * kHalf + column);
    }
    store(to + column, rounded<T>(activated<Form>(rounded<T>(gate))) * Form::factor(rounded<T>(up)));
  }
}

// Adds bias and residual to a row's sums of one panel and rounds once, or applies the gate to them.
template <typename T, int kColumns = kPanel>
void finish(float* sums, const Operands& operands, int64_t row, int panel) {
  if (operands.gate == Activation::kSilu) return finish_gated<Silu, T, kColumns>(sums, operands, row, panel);
  if (operands.gate == Activation::kGeluTanh) return finish_gated<GeluTanh, T, kColumns>(sums, operands, row, panel);
  if (operands.gate == Activation::kSwigluOai) return finish_gated<SwigluOai, T, kColumns>(sums, operands, row, panel);
  const int begin = panel * kColumns;
  const int count = std::min(kColumns, operands.num_columns - begin);
  const int64_t place = row * (operands.row_columns ? operands.row_columns : operands.num_columns) + begin;
  const auto add = [&](const T* addend) {
    int column = 0;
    for (; column + kLanes <= count; column += kLanes)
      store(sums + column, load(sums + column) + load(addend + column));
    for (; column < count; ++column) sums[column] += widen(addend[column]);
  };
  if (operands.bias != nullptr) add(static_cast<const T*>(operands.bias) + begin);
  if (operands.residual != nullptr) add(static_cast<const T*>(operands.residual) + place);
  T* to = static_cast<T*>(operands.output) + place;
  int column = 0;
  for (; column + kLanes <= count; column += kLanes) store(to + column, load(sums + column));
  for (; column < count; ++column) narrow(to + column, sums[column]);
}

// ---- tiles of a job ----

// Prefetch of a tile while it computes: its share, in proportion to its rows, of the data after the bytes that all
// tiles read.
//
// Where a panel is read front to back by one tile, faster than memory delivers it, the hardware prefetches better (Zen
// 4, one row, int4: 20 GB/s per core with these prefetches, and 32 without, which is the rate of a plain read). With
// several tiles it would rest while all but the first of them find their data in a cache.
class PanelPrefetch {
 public:
  // from: start of the data, `num_bytes` long, that all tiles prefetch in `num_steps` steps each.
  // row, tile_rows, num_rows: first row and number of rows of the tile, and number of all rows.
  // is_streamed: leave it to the hardware.
  PanelPrefetch(const uint8_t* from, int num_bytes, int num_steps, int row, int tile_rows, int num_rows,
                bool is_streamed = false)
      : next_(from + int64_t(num_bytes) * row / num_rows), num_lines_(0) {
    if (is_streamed) return;
    const int64_t unit = int64_t(num_rows) * num_steps * kLineBytes;
    num_lines_ = int((int64_t(num_bytes) * tile_rows + unit - 1) / unit);
  }

  QUIRE_INLINE void step() {
    for (int line = 0; line < num_lines_; ++line, next_ += kLineBytes) fetch(next_);
  }

 private:
  static constexpr int kLineBytes = 64;

  const uint8_t* next_;
  int num_lines_;  // number of lines for each step
};

// Widens rows to [num_rows, width] floats.
template <typename T>
void widen_rows(const T* x, int64_t row_stride, int64_t num_rows, int width, float* rows) {
  quire::in_parallel(num_rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = x + row * row_stride;
      int step = 0;
      for (; step + kLanes <= width; step += kLanes) store(rows + row * width + step, load(from + step));
      for (; step < width; ++step) rows[row * width + step] = widen(from[step]);
    }
  });
}

// ---- weights of two bytes, plain or compressed: panels have the same number of columns on every level ----

constexpr int kWeightPanel = 64;

static_assert(kWeightPanel % kPanel == 0 && kPanel % (2 * kLanes) == 0);

// Calls `body(panel, first row, number of rows)` for each panel of `kColumns` and each block of rows, on all threads.
template <int kColumns = kWeightPanel, typename Body>
void in_blocks(int64_t num_columns, int64_t num_rows, Body body) {
  const int64_t num_blocks = (num_rows + kJobRows - 1) / kJobRows;
  quire::in_runs(num_blocks * num_panels<kColumns>(num_columns), [&](int64_t job) {
    const int64_t first = job % num_blocks * kJobRows;
    body(job / num_blocks, first, int(std::min<int64_t>(kJobRows, num_rows - first)));
  });
}

// Finishes the rows [first, first + num_rows) of a panel, whose sums are [rows, kWeightPanel].
template <typename T>
void finish_rows(const Operands& operands, int64_t panel, int64_t first, int num_rows, float* sums) {
  for (int row = 0; row < num_rows; ++row)
    finish<T, kWeightPanel>(sums + row * kWeightPanel, operands, first + row, int(panel));
}

// Calls `body(panel, column, idx)` for each of the columns `ids` of a weight, on all threads. If one of them is not in
// [0, num_columns), returns false without a call.
template <typename Body>
bool for_each_column(const int64_t* ids, int64_t num_ids, int64_t num_columns, Body body) {
  constexpr int kFewIds = 8;  // finished before another thread has woken up
  if (!std::all_of(ids, ids + num_ids, [=](int64_t id) { return id >= 0 && id < num_columns; })) return false;
  quire::in_parallel(num_ids, kFewIds, [&](int64_t begin, int64_t end) {
    for (int64_t idx = begin; idx < end; ++idx) body(ids[idx] / kWeightPanel, int(ids[idx] % kWeightPanel), idx);
  });
  return true;
}

}  // namespace
