// Linear layers with int8 weights, one scale for each output column, and int8 activations, one scale for each row.
//
// Sums are integers and exact, so a row gets the same bits in every batch.
#include "int8_activations.h"

namespace {

// A packed weight: panels of [kPanel] float scales of the columns, followed by [depth, kPanel] steps.
struct Int8Weight {
  const uint8_t* panels;
  int depth;  // number of steps

  static int64_t panel_bytes(int64_t width) { return kPanel * (width + int64_t(sizeof(float))); }

  const float* scales(int panel) const {
    return reinterpret_cast<const float*>(panels + panel * panel_bytes(depth * kStepBytes));
  }
  const uint8_t* steps(int panel) const { return reinterpret_cast<const uint8_t*>(scales(panel) + kPanel); }
};

// Adds the products of `depth` steps to the sums [rows, kPanel].
//
// starts: start values of the rows' sums, or null to continue from `sums`.
// ahead: prefetch of the data that is read next.
template <int kRows>
void multiply_tile(const int8_t* x, int width, const uint8_t* steps, int depth, const int32_t* starts,
                   PanelPrefetch ahead, int32_t* sums) {
  Ints totals[kRows][kTileVectors];
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector)
      totals[row][vector] = starts ? Ints{} + starts[row] : load_bits<Ints>(sums + row * kPanel + vector * kLanes);
  for (int step = 0; step < depth; ++step) {
    Ints columns[kTileVectors];
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector) {
      columns[vector] = load_bits<Ints>(steps + (step * kPanel + vector * kLanes) * kStepBytes);
    }
    ahead.step();
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const Ints values = broadcast(x + row * width + step * kStepBytes);
#pragma GCC unroll 4
      for (int vector = 0; vector < kTileVectors; ++vector) multiply_add(totals[row][vector], columns[vector], values);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector)
      store_bits(sums + row * kPanel + vector * kLanes, totals[row][vector]);
}

// Scales the sums [rows, kPanel] of one panel, and adds bias and residual. Sums of a full panel without a gate go from
// registers to the output: compared to the int8 products, a detour through memory takes a twentieth of the time of 16
// rows.
template <typename T>
void finish_sums(const Int8Rows& rows, const float* scales, const Operands& operands, int panel, int64_t first,
                 int num_rows, const int32_t* sums) {
  const T* bias = operands.bias == nullptr ? nullptr : static_cast<const T*>(operands.bias) + panel * kPanel;
  const bool is_plain = operands.gate == Activation::kNone && (panel + 1) * kPanel <= operands.num_columns;
  for (int64_t row = first; row < first + num_rows; ++row, sums += kPanel) {
    const int64_t place = row * operands.num_columns + panel * kPanel;
    const T* residual = operands.residual == nullptr ? nullptr : static_cast<const T*>(operands.residual) + place;
    alignas(64) float products[kPanel];
#pragma GCC unroll 4
    for (int column = 0; column < kPanel; column += kLanes) {
      const Floats numbers = __builtin_convertvector(load_bits<Ints>(sums + column), Floats);
      Floats product = numbers * (load(scales + column) * rows.scales[row]);
      if (!is_plain) {
        store(products + column, product);
        continue;
      }
      if (bias) product += load(bias + column);
      if (residual) product += load(residual + column);
      store(static_cast<T*>(operands.output) + place + column, product);
    }
    if (!is_plain) finish<T>(products, operands, row, panel);
  }
}

// Multiplies the rows [first, first + num_rows) by one panel.
template <typename T>
void multiply_rows(const Int8Rows& rows, const Int8Weight& weight, const Operands& operands, int panel, int64_t first,
                   int num_rows) {
  alignas(64) int32_t sums[kJobRows * kPanel];
  const int8_t* x = rows.values.get() + first * rows.width;
  const uint8_t* steps = weight.steps(panel);
  const int piece = num_rows <= kFewPieceRows ? kPieceSteps : kLongPieceSteps;
  for (int step = 0; step < weight.depth; step += piece) {
    const int depth = std::min(piece, weight.depth - step), num_bytes = depth * kPanel * kStepBytes;
    const uint8_t* from = steps + step * kPanel * kStepBytes;
    in_tiles<kTileRows>(num_rows, [&](int row, auto count) {
      const PanelPrefetch ahead(from + num_bytes, num_bytes, depth, row, count.value, num_rows);
      multiply_tile<count.value>(x + row * rows.width + step * kStepBytes, rows.width, from, depth,
                                 step == 0 ? rows.starts.get() + first + row : nullptr, ahead, sums + row * kPanel);
    });
  }
  finish_sums<T>(rows, weight.scales(panel), operands, panel, first, num_rows, sums);
}

}  // namespace

// Returns the number of bytes of a packed weight; `width` is a multiple of 4.
QUIRE_EXPORT int64_t quire_bytes_int8(int64_t num_columns, int64_t width) {
  return num_panels(int(num_columns)) * Int8Weight::panel_bytes(width);
}

// Rounds and packs a weight [num_columns, width].
QUIRE_EXPORT void quire_pack_int8(int64_t type, const void* weight, int64_t num_columns, int64_t width, bool is_gated,
                                  void* packed) {
  with_type(Type(type), [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const auto* from = static_cast<const T*>(weight);
    quire::in_parallel(num_panels(int(num_columns)), 1, [&](int64_t begin, int64_t end) {
      std::unique_ptr<int8_t[]> values(new int8_t[width]);
      for (int64_t panel = begin; panel < end; ++panel) {
        auto* scales = reinterpret_cast<float*>(static_cast<uint8_t*>(packed) + panel * Int8Weight::panel_bytes(width));
        auto* steps = reinterpret_cast<uint8_t*>(scales + kPanel);
        const int count = int(std::min<int64_t>(kPanel, num_columns - panel * kPanel));
        // The padding is not written: sums that depend on it are never read.
        for (int column = 0; column < count; ++column) {
          const T* row = from + column_of<kPanel>(panel, column, num_columns, is_gated) * width;
          scales[column] = round_row(row, int(width), values.get());
          for (int64_t idx = 0; idx < width; ++idx)
            steps[(idx / kStepBytes * kPanel + column) * kStepBytes + idx % kStepBytes] =
                uint8_t(values[idx] + kWeightOffset);
        }
      }
    });
  });
}

// Multiplies rows [num_rows, width] by a packed weight; bias and residual may be null.
QUIRE_EXPORT void quire_linear_int8(Type type, const void* x, int64_t row_stride, int64_t num_rows, const void* packed,
                                    int64_t num_columns, int64_t width, const void* bias, const void* residual,
                                    Activation gate, void* output) {
  with_type(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const Int8Weight weight{static_cast<const uint8_t*>(packed), int(width / kStepBytes)};
    const Operands operands{x, row_stride, bias, residual, output, int(num_columns), gate};
    const Int8Rows rows(static_cast<const T*>(x), row_stride, num_rows, int(width), 1, kWeightOffset);
    in_blocks<kPanel>(operands.num_columns, num_rows, [&](int panel, int64_t first, int count) {
      multiply_rows<T>(rows, weight, operands, panel, first, count);
    });
  });
}
