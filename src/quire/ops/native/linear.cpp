// Linear layers on weights packed once: y = x W^T + bias + residual.
//
// A panel of 64 output columns is read from memory front to back, a piece at a time; a piece stays in the first level
// of the cache while all rows meet it, and the next one is fetched meanwhile. One row is bound by the bytes of the
// weight, many by arithmetic, and those between by both at once. Each output is the same sum in the same order
// whatever other rows are there: a row gets the same bits in every batch.
#include "linear.h"

#include "tiles.h"

namespace {

template <typename Steps>
struct Weight {
  const typename Steps::Value* panels;  // [panels, depth, kPanel] steps
  int depth;                            // steps
  int num_columns;
};

// Rows [first, first + num_rows) and the columns of one panel.
template <typename T, typename Steps>
void multiply_rows(const Weight<Steps>& weight, const Operands& operands, int panel, int64_t first, int num_rows) {
  alignas(64) float sums[kJobRows * kPanel];
  float ones[kJobRows];
  std::fill_n(ones, num_rows, 1.0f);
  const T* x = static_cast<const T*>(operands.x) + first * operands.row_stride;
  const T* columns = weight.panels + int64_t(panel) * weight.depth * kPanel * Steps::kValues;
  const int piece = num_rows <= kFewPieceRows ? kPieceSteps : kLongPieceSteps;
  for (int step = 0; step < weight.depth; step += piece) {
    const int depth = std::min(piece, weight.depth - step);
    multiply<Steps, true>(x + step * Steps::kValues, int(operands.row_stride), columns + step * kPanel * Steps::kValues,
                          depth, sums, kPanel, step > 0 ? ones : nullptr, num_rows, kPanel);
  }
  finish_rows<T>(operands, weight.num_columns, panel, first, num_rows, sums);
}

#if defined(__AVX512BF16__)
using WeightSteps = BFloat16Pairs;
#else
using WeightSteps = SingleFloats;  // correct, and no faster than what torch has
#endif

}  // namespace

// The type of weights that are worth packing here; -1: none.
QUIRE_EXPORT int64_t quire_packed_type() {
#if defined(__AVX512BF16__)
  return static_cast<int64_t>(Type::kBFloat16);
#else
  return -1;
#endif
}

// The columns that a packed weight has room for.
QUIRE_EXPORT int64_t quire_packed_columns(int64_t num_columns) { return (num_columns + kPanel - 1) / kPanel * kPanel; }

// Packs a weight [num_columns, width] into [packed columns * width] values; `width` is even.
QUIRE_EXPORT void quire_pack(const void* weight, int64_t num_columns, int64_t width, void* packed) {
  using Value = WeightSteps::Value;
  quire::in_parallel((num_columns + kPanel - 1) / kPanel, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int count = int(std::min<int64_t>(kPanel, num_columns - panel * kPanel));
      const Value* columns[kPanel];
      for (int column = 0; column < count; ++column)
        columns[column] = static_cast<const Value*>(weight) + (panel * kPanel + column) * width;
      // The padding is read, and its sums are not: it must exist, and may hold anything.
      pack_columns<WeightSteps, Value>(columns, 0, count, int(width), static_cast<Value*>(packed) + panel * kPanel * width);
    }
  });
}

// Multiplies rows [num_rows, width] by a packed weight; bias and residual may be null.
QUIRE_EXPORT void quire_linear(const void* x, int64_t row_stride, int64_t num_rows, const void* packed,
                               int64_t num_columns, int64_t width, const void* bias, const void* residual,
                               void* output) {
  using Steps = WeightSteps;
  using Value = Steps::Value;
  const Weight<Steps> weight{static_cast<const Value*>(packed), int(width / Steps::kValues), int(num_columns)};
  const Operands operands{x, row_stride, bias, residual, output};
  for_each_job(num_rows, num_columns, [&](int panel, int64_t first, int count) {
    multiply_rows<Value>(weight, operands, panel, first, count);
  });
}
