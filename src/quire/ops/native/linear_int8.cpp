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

// ---- products ----

#if !defined(QUIRE_VNNI) && defined(__AVX2__)

// Without an instruction for bytes, products of 16 bits take the fewest: two pairs of a step are multiplied and added
// up side by side, so that a column has two sums. Weights are widened as they are loaded.
using Value = int16_t;
constexpr int kSums = 2;  // sums of a column
static_assert(kWeightOffset == 0);

QUIRE_INLINE Ints load_weights(const uint8_t* from) {
#if QUIRE_LANES == 16
  return (Ints)_mm512_cvtepi8_epi16(load_bits<__m256i>(from));
#else
  return (Ints)_mm256_cvtepi8_epi16(load_bits<__m128i>(from));
#endif
}

QUIRE_INLINE Ints load_values(const int16_t* step) {
  typedef int64_t Longs __attribute__((vector_size(4 * QUIRE_LANES)));
  return bit_cast<Ints>(Longs{} + load_bits<int64_t>(step));
}

QUIRE_INLINE void add_products(Ints& sum, Ints weights, Ints values) {
#if QUIRE_LANES == 16
  sum += (Ints)_mm512_madd_epi16((__m512i)weights, (__m512i)values);
#else
  sum += (Ints)_mm256_madd_epi16((__m256i)weights, (__m256i)values);
#endif
}

template <int... kLane>
QUIRE_INLINE Ints add_pairs(Ints low, Ints high, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(low, high, (2 * kLane)...) + __builtin_shufflevector(low, high, (2 * kLane + 1)...);
}

// Returns the sums of a vector of columns.
QUIRE_INLINE Ints load_sums(const int32_t* from) {
  return add_pairs(load_bits<Ints>(from), load_bits<Ints>(from + kLanes), std::make_integer_sequence<int, kLanes>());
}

#else

using Value = int8_t;
constexpr int kSums = 1;

QUIRE_INLINE Ints load_weights(const uint8_t* from) { return load_bits<Ints>(from); }
QUIRE_INLINE Ints load_values(const int8_t* step) { return broadcast(step); }
QUIRE_INLINE void add_products(Ints& sum, Ints weights, Ints values) { multiply_add(sum, weights, values); }
QUIRE_INLINE Ints load_sums(const int32_t* from) { return load_bits<Ints>(from); }

#endif

constexpr int kSumPanel = kSums * kPanel;
constexpr int kVectorBytes = kLanes * kStepBytes / kSums;  // weights of a vector of sums

// Adds the products of `depth` steps to vectors of the sums [rows, kSumPanel].
//
// starts: start values of the rows' sums, or null to continue from `sums`.
// ahead: prefetch of the data that is read next.
template <int kRows, int kVectors>
void multiply_vectors(const Value* x, int width, const uint8_t* steps, int depth, const int32_t* starts,
                      PanelPrefetch ahead, int32_t* sums) {
  Ints totals[kRows][kVectors];
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector)
      totals[row][vector] = starts ? Ints{} + starts[row] : load_bits<Ints>(sums + row * kSumPanel + vector * kLanes);
#pragma GCC unroll 1
  for (int step = 0; step < depth; ++step) {
    Ints columns[kVectors];
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector)
      columns[vector] = load_weights(steps + step * kPanel * kStepBytes + vector * kVectorBytes);
    ahead.step();
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const Ints values = load_values(x + row * width + step * kStepBytes);
#pragma GCC unroll 8
      for (int vector = 0; vector < kVectors; ++vector) add_products(totals[row][vector], columns[vector], values);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector)
      store_bits(sums + row * kSumPanel + vector * kLanes, totals[row][vector]);
}

// Scales the sums [rows, kSumPanel] of one panel, and adds bias and residual. Sums of a full panel without a gate go
// from registers to the output: compared to the int8 products, a detour through memory takes a twentieth of the time of
// 16 rows.
template <typename T>
void finish_sums(const Int8Rows<Value>& rows, const float* scales, const Operands& operands, int panel, int64_t first,
                 int num_rows, const int32_t* sums) {
  const T* bias = operands.bias == nullptr ? nullptr : static_cast<const T*>(operands.bias) + panel * kPanel;
  const bool is_plain = operands.gate == Activation::kNone && (panel + 1) * kPanel <= operands.num_columns;
  for (int64_t row = first; row < first + num_rows; ++row, sums += kSumPanel) {
    const int64_t place = row * operands.num_columns + panel * kPanel;
    const T* residual = operands.residual == nullptr ? nullptr : static_cast<const T*>(operands.residual) + place;
    alignas(64) float products[kPanel];
#pragma GCC unroll 4
    for (int column = 0; column < kPanel; column += kLanes) {
      const Floats numbers = __builtin_convertvector(load_sums(sums + kSums * column), Floats);
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
void multiply_rows(const Int8Rows<Value>& rows, const Int8Weight& weight, const Operands& operands, int panel,
                   int64_t first, int num_rows) {
  alignas(64) int32_t sums[kJobRows * kSumPanel];
  const Value* x = rows.values.get() + first * rows.width;
  const uint8_t* steps = weight.steps(panel);
  const int piece = num_rows <= kFewPieceRows ? kPieceSteps : kLongPieceSteps;
  for (int step = 0; step < weight.depth; step += piece) {
    const int depth = std::min(piece, weight.depth - step), num_bytes = depth * kPanel * kStepBytes;
    const uint8_t* from = steps + step * kPanel * kStepBytes;
    in_even_tiles<kTileRows>(num_rows, [&](int row, auto count) {
      // One or two rows leave registers for all vectors, so that the panel is read front to back.
      constexpr int kVectors = count.value <= 2 ? kSums * kTileVectors : kTileVectors;
      const bool is_streamed = count.value == num_rows && kVectors == kSums * kTileVectors;
      const PanelPrefetch ahead(from + num_bytes, num_bytes, depth, row, count.value, num_rows, is_streamed);
      for (int vector = 0; vector < kSums * kTileVectors; vector += kVectors)
        multiply_vectors<count.value, kVectors>(x + row * rows.width + step * kStepBytes, rows.width,
                                                from + vector * kVectorBytes, depth,
                                                step == 0 ? rows.starts.get() + first + row : nullptr, ahead,
                                                sums + row * kSumPanel + vector * kLanes);
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
    const Int8Rows<Value> rows(static_cast<const T*>(x), row_stride, num_rows, int(width), 1, kWeightOffset);
    in_blocks<kPanel>(operands.num_columns, num_rows, [&](int panel, int64_t first, int count) {
      multiply_rows<T>(rows, weight, operands, panel, first, count);
    });
  });
}
