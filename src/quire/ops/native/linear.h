// What linear layers share, however their weights lie: where rows come from and go to.
#pragma once

#include <algorithm>

#include "cache.h"
#include "gemm.h"

namespace {

constexpr int kJobRows = 96;  // rows of a job, at most; whole tiles
// Steps of a piece of a panel. For few rows it fits the first level of the cache (16 KiB where steps are multiplied by
// AVX-512); for many, the second will do, and sums are put down and taken up less often.
constexpr int kPieceSteps = 64;
constexpr int kLongPieceSteps = 256;
constexpr int kFewPieceRows = 16;

constexpr int num_panels(int num_columns) { return (num_columns + kPanel - 1) / kPanel; }

struct Operands {
  const void* x;  // [rows, width]
  int64_t row_stride;
  const void* bias;      // [columns], or null
  const void* residual;  // [rows, columns], or null
  void* output;          // [rows, columns]
  int num_columns;
};

// Adds bias and residual to a row's sums of one panel, and puts them down.
template <typename T>
void finish(float* sums, const Operands& operands, int64_t row, int panel) {
  const int begin = panel * kPanel;
  const int count = std::min(kPanel, operands.num_columns - begin);
  const int64_t place = row * operands.num_columns + begin;
  const auto add = [&](const T* addend) {
    int column = 0;
    for (; column + kLanes <= count; column += kLanes) store(sums + column, load(sums + column) + load(addend + column));
    for (; column < count; ++column) sums[column] += widen(addend[column]);
  };
  if (operands.bias != nullptr) add(static_cast<const T*>(operands.bias) + begin);
  if (operands.residual != nullptr) add(static_cast<const T*>(operands.residual) + place);
  T* to = static_cast<T*>(operands.output) + place;
  int column = 0;
  for (; column + kLanes <= count; column += kLanes) store(to + column, load(sums + column));
  for (; column < count; ++column) narrow(to + column, sums[column]);
}

}  // namespace
