// Linear layers with weights of two bytes, packed once into panels.
//
// Panels hold pairs where the instruction set multiplies pairs of bfloat16. Elsewhere each weight is widened to a float
// as it is loaded.
#include "cache.h"
#include "dpbf16.h"
#include "upcast_weights.h"

namespace {

// Calls `body` with a null pointer to the class that packs weights of a type; does not call it for a type that is not
// packed.
template <typename Body>
void with_weight(Type type, Body body) {
  switch (type) {
    case Type::kFloat32: break;
    case Type::kFloat16: body(static_cast<WidenedWeight<Float16>*>(nullptr)); break;
#if defined(__AVX512BF16__)
    case Type::kBFloat16: body(static_cast<PairedWeight*>(nullptr)); break;
#else
    case Type::kBFloat16: body(static_cast<WidenedWeight<BFloat16>*>(nullptr)); break;
#endif
  }
}

}  // namespace

// Returns whether weights of a type are packed.
QUIRE_EXPORT bool quire_packs(Type type) {
#if defined(__x86_64__) && !defined(__F16C__)
  if (type == Type::kFloat16) return false;  // widened value by value, they would take longer than in torch
#endif
  bool is_packed = false;
  with_weight(type, [&](auto*) { is_packed = true; });
  return is_packed;
}

// Returns the number of columns that a packed weight has room for.
QUIRE_EXPORT int64_t quire_packed_columns(int64_t num_columns) {
  return num_panels<kWeightPanel>(num_columns) * kWeightPanel;
}

// Returns the number of columns of a panel, for quantised weights (`is_rounded`) or for weights of two bytes. The
// number of columns of a gated weight must be a multiple of it.
QUIRE_EXPORT int64_t quire_panel_columns(bool is_rounded) { return is_rounded ? kPanel : kWeightPanel; }

// Packs a weight [num_columns, width] of bfloat16 or float16 into [packed columns * width] values; `width` is even.
QUIRE_EXPORT void quire_pack(Type type, const void* weight, int64_t num_columns, int64_t width, bool is_gated,
                             void* packed) {
  with_weight(type, [&](auto* kind) {
    using Weight = std::remove_pointer_t<decltype(kind)>;
    using Value = typename Weight::Value;
    quire::in_parallel(num_panels<kWeightPanel>(num_columns), 1, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        const int count = int(std::min<int64_t>(kWeightPanel, num_columns - panel * kWeightPanel));
        const Value* columns[kWeightPanel];
        for (int column = 0; column < count; ++column)
          columns[column] =
              static_cast<const Value*>(weight) + column_of<kWeightPanel>(panel, column, num_columns, is_gated) * width;
        Weight::pack(columns, count, int(width), static_cast<Value*>(packed) + panel * width * kWeightPanel);
      }
    });
  });
}

// Multiplies rows [num_rows, width] by a packed weight; bias and residual may be null.
QUIRE_EXPORT void quire_linear(Type type, const void* x, int64_t row_stride, int64_t num_rows, const void* packed,
                               int64_t num_columns, int64_t width, const void* bias, const void* residual,
                               Activation gate, void* output) {
  const Operands operands{x, row_stride, bias, residual, output, int(num_columns), gate};
  with_weight(type, [&](auto* kind) {
    using Weight = std::remove_pointer_t<decltype(kind)>;
    Weight::multiply(operands, num_rows, static_cast<const typename Weight::Value*>(packed), num_columns, int(width));
  });
}

// Copies columns of a packed weight: ids [num_ids] to output [num_ids, width]. Returns false for an ID out of range.
QUIRE_EXPORT bool quire_rows(Type type, const void* packed, int64_t num_columns, int64_t width, const int64_t* ids,
                             int64_t num_ids, void* output) {
  bool is_found = false;
  with_weight(type, [&](auto* kind) {
    using Weight = std::remove_pointer_t<decltype(kind)>;
    using Value = typename Weight::Value;
    is_found = for_each_column(ids, num_ids, num_columns, [&](int64_t panel, int column, int64_t idx) {
      const auto* from = static_cast<const Value*>(packed) + panel * width * kWeightPanel + Weight::place_of(column);
      auto* to = static_cast<Value*>(output) + idx * width;
      for (int64_t step = 0; step < width; step += Weight::kStepValues, from += kWeightPanel * Weight::kStepValues)
        std::copy_n(from, Weight::kStepValues, to + step);
    });
  });
  return is_found;
}
