// Linear layers on weights of two bytes each, packed once into panels.
//
// Where the instruction set multiplies pairs of bfloat16, panels hold pairs. Elsewhere each weight is widened to a
// float on its way from memory: for few rows in registers, for more in a piece that all rows of a job then meet.
#include <memory>

#include "linear.h"
#include "parallel.h"
#include "tiles.h"

namespace {

constexpr int kWeightPanel = 64;  // columns of a panel

static_assert(kWeightPanel % kPanel == 0 && kPanel % (2 * kLanes) == 0);

// Calls `body(panel, first row, rows)` for each panel and each block of rows, on all threads.
template <typename Body>
void in_blocks(int64_t num_columns, int64_t num_rows, Body body) {
  const int64_t num_blocks = (num_rows + kJobRows - 1) / kJobRows;
  quire::in_turns(num_blocks * num_panels<kWeightPanel>(num_columns), [&](int64_t job) {
    const int64_t first = job % num_blocks * kJobRows;
    body(int(job / num_blocks), first, int(std::min<int64_t>(kJobRows, num_rows - first)));
  });
}

// ---- pairs ----

#if defined(__AVX512BF16__)
struct PairedWeight {
  using Steps = BFloat16Pairs;
  using Value = BFloat16;

  // Packs the columns [num_columns, width] of a panel.
  static void pack(const Value* const* columns, int count, int width, Value* panel) {
    // The padding is read, and its sums are not: it must exist, and may hold anything.
    pack_columns<Steps, Value>(columns, 0, count, width, panel);
  }

  static void multiply(const Operands& operands, int64_t num_rows, const Value* packed, int width) {
    const int depth = width / Steps::kValues;
    in_blocks(operands.num_columns, num_rows, [&](int panel, int64_t first, int count) {
      alignas(64) float sums[kJobRows * kWeightPanel];
      float ones[kJobRows];
      std::fill_n(ones, count, 1.0f);
      const Value* x = static_cast<const Value*>(operands.x) + first * operands.row_stride;
      const Value* columns = packed + int64_t(panel) * width * kWeightPanel;
      const int piece = count <= kFewPieceRows ? kPieceSteps : kLongPieceSteps;
      for (int step = 0; step < depth; step += piece) {
        ::multiply<Steps, true>(x + step * Steps::kValues, int(operands.row_stride),
                                columns + step * kWeightPanel * Steps::kValues, std::min(piece, depth - step), sums,
                                kWeightPanel, step > 0 ? ones : nullptr, count, kWeightPanel);
      }
      for (int row = 0; row < count; ++row) finish<Value, kWeightPanel>(sums + row * kWeightPanel, operands, first + row, panel);
    });
  }
};
#endif

// ---- widened on the way ----

constexpr int kWidenedSteps = 256;  // of a piece that is widened for many rows: 16 KiB of each of its panels
constexpr int kDirectSteps = 64;    // of a piece whose columns are taken in turns: 8 KiB
constexpr int kDirectRows = 3;      // rows that are multiplied straight from the weight

// Two vectors of columns: how they lie, and how they are taken up.
template <typename T>
struct ColumnPair {
  static QUIRE_INLINE void load_both(const T* from, Floats& low, Floats& high) {
    low = load(from);
    high = load(from + kLanes);
  }
  // words: a column of the first vector, and above it one of the second.
  static QUIRE_INLINE void store_both(T* to, Words words) {
    store_bits(to, __builtin_convertvector(words, Halves));
    store_bits(to + kLanes, __builtin_convertvector(words >> 16, Halves));
  }
};

// In turns, so that a shift and a mask widen them.
template <>
struct ColumnPair<BFloat16> {
  static QUIRE_INLINE void load_both(const BFloat16* from, Floats& low, Floats& high) {
    const Words words = load_bits<Words>(from);
    low = bit_cast<Floats>(words << 16);
    high = bit_cast<Floats>(words & 0xffff0000u);
  }
  static QUIRE_INLINE void store_both(BFloat16* to, Words words) { store_bits(to, words); }
};

// Multiplies rows by some vectors of columns, from the weight as it lies: sums[row, column] += x[row, step] w[step, column].
template <typename T, int kRows, int kVectors>
void multiply_directly(const float* x, int64_t width, const T* columns, int depth, float* sums) {
  Floats totals[kRows][kVectors];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector) totals[row][vector] = load(sums + row * kWeightPanel + vector * kLanes);
  for (int step = 0; step < depth; ++step) {
    Floats values[kVectors];
    const T* from = columns + step * kWeightPanel;
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; vector += 2) {
      ColumnPair<T>::load_both(from + vector * kLanes, values[vector], values[vector + 1]);
      if (vector * kLanes % (64 / int(sizeof(T))) == 0) fetch(from + kDirectSteps * kWeightPanel + vector * kLanes);
    }
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
    for (int vector = 0; vector < kVectors; ++vector) store(sums + row * kWeightPanel + vector * kLanes, totals[row][vector]);
}

template <typename T>
struct WidenedWeight {
  using Value = T;
  static constexpr int kVectors = kWeightPanel / kLanes;

  // Packs the columns [num_columns, width] of a panel; the padding repeats the last one, and its sums are not read.
  static void pack(const T* const* columns, int count, int width, T* panel) {
    const auto column_at = [&](int column) { return columns[std::min(column, count - 1)]; };
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

  // The next steps of a column, one a word.
  static QUIRE_INLINE Words steps_of(const T* from, int num_steps) {
    if (num_steps == kLanes) return __builtin_convertvector(load_bits<Halves>(from), Words);
    Words steps{};
    for (int lane = 0; lane < num_steps; ++lane) steps[lane] = from[lane].bits;
    return steps;
  }

  static void multiply(const Operands& operands, int64_t num_rows, const T* packed, int width) {
    // Each of x's values is needed once for each panel: they are widened once.
    const std::unique_ptr<float[]> rows(new float[num_rows * width]);
    quire::in_parallel(num_rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* from = static_cast<const T*>(operands.x) + row * operands.row_stride;
        int step = 0;
        for (; step + kLanes <= width; step += kLanes) store(&rows[row * width + step], load(from + step));
        for (; step < width; ++step) rows[row * width + step] = widen(from[step]);
      }
    });
    in_blocks(operands.num_columns, num_rows, [&](int panel, int64_t first, int count) {
      alignas(64) float sums[kJobRows * kWeightPanel];
      std::fill_n(sums, count * kWeightPanel, 0.0f);
      const float* x = &rows[first * width];
      const T* columns = packed + int64_t(panel) * width * kWeightPanel;
      switch (count) {
        case 1: few<1>(x, columns, width, sums); break;
        case 2: few<2>(x, columns, width, sums); break;
        case kDirectRows: few<kDirectRows>(x, columns, width, sums); break;
        default: many(x, columns, width, sums, count);
      }
      for (int row = 0; row < count; ++row) finish<T, kWeightPanel>(sums + row * kWeightPanel, operands, first + row, panel);
    });
  }

  // For few rows; as many columns at once as there are registers for their sums.
  template <int kRows>
  static void few(const float* x, const T* columns, int width, float* sums) {
    constexpr int at_once = kRows == 1 && kVectors > 8 ? 8 : kRows == 1 ? kVectors : kVectors > 4 ? 4 : kVectors;
    for (int step = 0; step < width; step += kDirectSteps) {
      const int depth = std::min(kDirectSteps, width - step);
      for (int column = 0; column < kWeightPanel; column += at_once * kLanes)
        multiply_directly<T, kRows, at_once>(x + step, width, columns + step * kWeightPanel + column, depth, sums + column);
    }
  }

  // For many rows: a piece of the panel is widened into panels of the size that tiles have.
  static void many(const float* x, const T* columns, int width, float* sums, int num_rows) {
    thread_local std::unique_ptr<float[]> scratch(new float[kWidenedSteps * kWeightPanel + 16]);
    float* widened = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch.get()) + 63) & ~uintptr_t(63));
    float ones[kJobRows];
    std::fill_n(ones, num_rows, 1.0f);
    for (int start = 0; start < width; start += kWidenedSteps) {
      const int depth = std::min(kWidenedSteps, width - start);
      for (int step = 0; step < depth; ++step) {
        const T* from = columns + (start + step) * kWeightPanel;
        for (int column = 0; column < kWeightPanel; column += 2 * kLanes) {
          Floats low, high;
          ColumnPair<T>::load_both(from + column, low, high);
          fetch(from + column + kWidenedSteps * kWeightPanel);
          float* to = widened + column / kPanel * kPanel * depth + step * kPanel + column % kPanel;
          store(to, low);
          store(to + kLanes, high);
        }
      }
      ::multiply<SingleFloats>(x + start, width, widened, depth, sums, kWeightPanel, ones, num_rows, kWeightPanel);
    }
  }
};

// Calls `body` with a null pointer to what packs weights of a type; of one that is not packed, not at all.
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

// Whether weights of a type are packed here.
QUIRE_EXPORT bool quire_packs(Type type) {
#if defined(__x86_64__) && !defined(__F16C__)
  if (type == Type::kFloat16) return false;  // widened one by one, they would take longer than torch does
#endif
  bool is_packed = false;
  with_weight(type, [&](auto*) { is_packed = true; });
  return is_packed;
}

// The columns that a packed weight has room for.
QUIRE_EXPORT int64_t quire_packed_columns(int64_t num_columns) { return num_panels<kWeightPanel>(num_columns) * kWeightPanel; }

// Packs a weight [num_columns, width] of bfloat16 or float16 into [packed columns * width] values; `width` is even.
QUIRE_EXPORT void quire_pack(Type type, const void* weight, int64_t num_columns, int64_t width, void* packed) {
  with_weight(type, [&](auto* kind) {
    using Weight = std::remove_pointer_t<decltype(kind)>;
    using Value = typename Weight::Value;
    quire::in_parallel(num_panels<kWeightPanel>(num_columns), 1, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        const int count = int(std::min<int64_t>(kWeightPanel, num_columns - panel * kWeightPanel));
        const Value* columns[kWeightPanel];
        for (int column = 0; column < count; ++column)
          columns[column] = static_cast<const Value*>(weight) + (panel * kWeightPanel + column) * width;
        Weight::pack(columns, count, int(width), static_cast<Value*>(packed) + panel * width * kWeightPanel);
      }
    });
  });
}

// Multiplies rows [num_rows, width] by a packed weight; bias and residual may be null.
QUIRE_EXPORT void quire_linear(Type type, const void* x, int64_t row_stride, int64_t num_rows, const void* packed,
                               int64_t num_columns, int64_t width, const void* bias, const void* residual,
                               void* output) {
  const Operands operands{x, row_stride, bias, residual, output, int(num_columns)};
  with_weight(type, [&](auto* kind) {
    using Weight = std::remove_pointer_t<decltype(kind)>;
    Weight::multiply(operands, num_rows, static_cast<const typename Weight::Value*>(packed), int(width));
  });
}
