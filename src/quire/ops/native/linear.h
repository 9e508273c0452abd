// What linear layers share, however their weights are packed: jobs, and what is done with their sums.
#pragma once

#include <algorithm>

#include "cache.h"
#include "gemm.h"
#include "parallel.h"

namespace {

constexpr int kJobRows = 96;  // rows of a job, at most; whole tiles
// Steps of a piece of a panel. For few rows it fits the first level of the cache (16 KiB where pairs are multiplied);
// for many, the second will do, and sums are put down and taken up less often.
constexpr int kPieceSteps = 64;
constexpr int kLongPieceSteps = 256;
constexpr int kFewPieceRows = 16;

struct Operands {
  const void* x;  // [rows, depth] steps
  int64_t row_stride;
  const void* bias;      // [columns], or null
  const void* residual;  // [rows, columns], or null
  void* output;          // [rows, columns]
};

// Adds bias and residual to the sums [num_rows, kPanel] of a panel's columns, rounds once and stores them.
template <typename T>
void finish_rows(const Operands& operands, int num_columns, int panel, int64_t first, int num_rows, float* sums) {
  const int begin = panel * kPanel;
  const int count = std::min(kPanel, num_columns - begin);
  for (int row = 0; row < num_rows; ++row) {
    const int64_t place = (first + row) * num_columns + begin;
    float* sum = sums + row * kPanel;
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

// Calls `body(panel, first row, number of rows)` for each job of a product.
template <typename Body>
void for_each_job(int64_t num_rows, int64_t num_columns, Body body) {
  const int64_t num_blocks = (num_rows + kJobRows - 1) / kJobRows;
  const int64_t num_panels = (num_columns + kPanel - 1) / kPanel;
  quire::in_turns(num_blocks * num_panels, [&](int64_t job) {
    const int64_t first = job % num_blocks * kJobRows;
    body(int(job / num_blocks), first, int(std::min<int64_t>(kJobRows, num_rows - first)));
  });
}

}  // namespace
