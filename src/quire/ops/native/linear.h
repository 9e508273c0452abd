// What linear layers have in common, whatever lies in their weights: y = x W^T + bias + residual.
//
// A panel of output columns is read from memory front to back, a piece at a time; a piece stays in the first level of
// the cache while all rows meet it, and the next one is fetched meanwhile. One row is bound by the bytes of the
// weight, many by arithmetic, and those between by both at once. Each output is the same sum in the same order
// whatever other rows are there: a row gets the same bits in every batch.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "tiles.h"

namespace {

constexpr int kWeightPanel = 64;  // columns of a panel of a weight
constexpr int kJobRows = 96;      // rows of a job, at most; whole tiles

static_assert(kWeightPanel % kPanel == 0 && kPanel % (2 * kLanes) == 0);

struct Operands {
  const void* x;  // [rows, width]
  int64_t row_stride;
  const void* bias;      // [columns], or null
  const void* residual;  // [rows, columns], or null
  void* output;          // [rows, columns]
};

constexpr int64_t num_panels_of(int64_t num_columns) { return (num_columns + kWeightPanel - 1) / kWeightPanel; }

// Adds bias and residual to the sums of rows [first, first + num_rows) and the columns of a panel, and rounds once.
//
// sums: [rows, kWeightPanel].
template <typename T>
void finish_rows(const Operands& operands, int64_t num_columns, int64_t panel, int64_t first, int num_rows, float* sums) {
  const int64_t begin = panel * kWeightPanel;
  const int count = int(std::min<int64_t>(kWeightPanel, num_columns - begin));
  for (int row = 0; row < num_rows; ++row) {
    const int64_t place = (first + row) * num_columns + begin;
    float* sum = sums + row * kWeightPanel;
    const auto add = [&](const T* addend) {
      int column = 0;
      for (; column + kLanes <= count; column += kLanes) store(sum + column, load(sum + column) + load(addend + column));
      for (; column < count; ++column) sum[column] += widen(addend[column]);
    };
    if (operands.bias != nullptr) add(static_cast<const T*>(operands.bias) + begin);
    if (operands.residual != nullptr) add(static_cast<const T*>(operands.residual) + place);
    T* to = static_cast<T*>(operands.output) + place;
    int column = 0;
    for (; column + kLanes <= count; column += kLanes) store(to + column, load(sum + column));
    for (; column < count; ++column) narrow(to + column, sum[column]);
  }
}

// Calls `body(panel, first row, rows)` for each panel and each block of rows, on all threads.
template <typename Body>
void in_blocks(int64_t num_columns, int64_t num_rows, Body body) {
  const int64_t num_blocks = (num_rows + kJobRows - 1) / kJobRows;
  quire::in_turns(num_blocks * num_panels_of(num_columns), [&](int64_t job) {
    const int64_t first = job % num_blocks * kJobRows;
    body(job / num_blocks, first, int(std::min<int64_t>(kJobRows, num_rows - first)));
  });
}

}  // namespace
