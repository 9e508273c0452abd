// Linear layers whose weights are multiplied as pairs of bfloat16.
#pragma once

#include "linear.h"

#if defined(__AVX512BF16__)

namespace {

using Pairs = BFloat16Pairs;

constexpr int kPairStepBytes = kWeightPanel * 2 * int(sizeof(BFloat16));
static_assert(kWeightPanel == kPanel);

// Rows and their sums of one panel.
struct PairRows {
  const BFloat16* x;  // [rows, width]
  int stride;
  int count;
  float* sums;    // [rows, kWeightPanel]
  bool is_begun;  // the products are added to the sums

  // Multiplies the values from `step` on by steps of a panel.
  //
  // next: data that is prefetched meanwhile.
  template <typename Panel>
  void multiply(int step, const Panel& panel, int depth, const uint8_t* next, int next_bytes) const {
    alignas(64) constexpr float kOnes[kTileRows] = {1, 1, 1, 1, 1, 1};
    in_tiles<kTileRows>(count, [&](int row, auto tile_rows) {
      const PanelPrefetch ahead(next, next_bytes, depth, row, tile_rows.value, count, tile_rows.value == count);
      const StridedRows<Pairs> rows{x + int64_t(row) * stride + step * Pairs::kValues, stride};
      multiply_tile<Pairs, tile_rows.value, kTileVectors>(rows, panel, depth, sums + row * kWeightPanel, kWeightPanel,
                                                          is_begun ? kOnes : nullptr, ahead);
    });
  }
};

// Remaining steps of a panel, stored as they are multiplied.
struct PlainPairs {
  const BFloat16* data;

  // Multiplies rows by the next steps, the first of which is `step`, and advances past them.
  void multiply(const PairRows& rows, int step, int depth) {
    const PanelSteps<Pairs> here{data};
    data += depth * kWeightPanel * Pairs::kValues;
    rows.multiply(step, here, depth, reinterpret_cast<const uint8_t*>(data), depth * kPairStepBytes);
  }
};

// Multiplies rows by a weight; `panel_at(panel)` returns one of its panels.
template <typename PanelAt>
void multiply_pairs(const Operands& operands, int64_t num_rows, int64_t num_columns, int width, PanelAt panel_at) {
  const int depth = width / Pairs::kValues;
  in_blocks(num_columns, num_rows, [&](int64_t panel, int64_t first, int count) {
    alignas(64) float sums[kJobRows * kWeightPanel];
    const BFloat16* x = static_cast<const BFloat16*>(operands.x) + first * operands.row_stride;
    PairRows rows{x, int(operands.row_stride), count, sums, false};
    auto left = panel_at(panel);
    const int piece = count <= kFewPieceRows ? kPieceSteps : kLongPieceSteps;
    for (int step = 0; step < depth; step += piece) {
      left.multiply(rows, step, std::min(piece, depth - step));
      rows.is_begun = true;
    }
    finish_rows<BFloat16>(operands, panel, first, count, sums);
  });
}

struct PairedWeight {
  using Value = BFloat16;

  // Packs the columns [num_columns, width] of a panel.
  static void pack(const Value* const* columns, int count, int width, Value* panel) {
    // The padding must exist because it is read, but may hold anything: its sums are not read.
    pack_columns<Pairs, Value>(columns, 0, count, width, panel);
  }

  // Number of adjacent values of a column in a step, and their index in the step.
  static constexpr int kStepValues = Pairs::kValues;
  static int place_of(int column) { return column * kStepValues; }

  static void multiply(const Operands& operands, int64_t num_rows, const Value* packed, int64_t num_columns,
                       int width) {
    multiply_pairs(operands, num_rows, num_columns, width,
                   [=](int64_t panel) { return PlainPairs{packed + panel * width * kWeightPanel}; });
  }
};

}  // namespace

#endif
