// Linear layers on bfloat16 weights that take three bytes for two values, bit for bit what `quire_linear` gives.
//
// The high byte of a bfloat16 is its sign and seven bits of its exponent, and weights that lie together have few of
// them. A block of a panel, 64 columns wide and 16 steps deep, names its 16 in a table; each weight is a code of four
// bits into it, and its low byte. A block with more of them stays as it is.
//
//  panel    | block | block | raw block | ... | last block |      steps in the order of `quire_pack`
//  step     | 64 codes of two weights | 128 low bytes |           of a block with a table
//
// A code's byte and a low byte lie where one shuffle and one interleaving put them into the registers that are
// multiplied. Few rows are multiplied as a step is expanded; for more, a piece is expanded into the cache first.
#include "linear.h"

#include "tiles.h"

#if defined(__AVX512BF16__)

namespace {

typedef uint8_t Bytes __attribute__((vector_size(64)));
using Steps = BFloat16Pairs;

constexpr int kBlockSteps = 16;
constexpr int kBlockWidth = kBlockSteps * Steps::kValues;  // values of a column
constexpr int kStepBytes = 4 * int(sizeof(Bytes));
constexpr int kPackedStepBytes = 3 * int(sizeof(Bytes));
// Packed bytes from what is expanded to what is asked for meanwhile.
constexpr int kAhead = kPieceSteps * kStepBytes;
static_assert(kStepBytes == kPanel * Steps::kValues * sizeof(BFloat16) && kPieceSteps % kBlockSteps == 0);

// The high bytes of a block in rising order, the last one repeated; a falling pair at the ends marks a raw block.
struct Table {
  uint8_t values[16];

  bool is_raw() const { return values[0] > values[15]; }
};

// The four vectors of a step's columns.
struct Columns {
  Words vectors[4];
};

// The low or the high bytes of 32 weights and of 32 more; within each 128 bits eight of the former, then of the latter.
template <int kByte, int... kLane>
QUIRE_INLINE Bytes split(Words a, Words b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector((Bytes)a, (Bytes)b,
                                 (kLane / 16 * 16 + kLane % 8 * 2 + kLane % 16 / 8 * 64 + kByte)...);
}

// The inverse: the weights of the former (`kHalf` 0) or the latter.
template <int kHalf, int... kLane>
QUIRE_INLINE Words join(Bytes low, Bytes high, std::integer_sequence<int, kLane...>) {
  return (Words)__builtin_shufflevector(low, high, (kLane / 16 * 16 + kHalf * 8 + kLane % 16 / 2 + kLane % 2 * 64)...);
}

constexpr std::make_integer_sequence<int, 64> kBytes{};

QUIRE_INLINE Columns raw_step(const uint8_t* from) {
  return {{load_bits<Words>(from), load_bits<Words>(from + 64), load_bits<Words>(from + 128),
           load_bits<Words>(from + 192)}};
}

QUIRE_INLINE Bytes look_up(Bytes table, Bytes codes) {
  return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
}

QUIRE_INLINE Columns expanded_step(const uint8_t* from, Bytes table) {
  const Bytes codes = load_bits<Bytes>(from);
  const Bytes low[] = {load_bits<Bytes>(from + 64), load_bits<Bytes>(from + 128)};
  const Bytes high[] = {look_up(table, codes & 15), look_up(table, codes >> 4)};
  return {{join<0>(low[0], high[0], kBytes), join<1>(low[0], high[0], kBytes), join<0>(low[1], high[1], kBytes),
           join<1>(low[1], high[1], kBytes)}};
}

// Each high byte's place in a table. One that the table repeats gets the last of its places, for that has all bits.
QUIRE_INLINE Bytes codes_of(Bytes high, const Table& table) {
  Bytes codes{};
  for (int code = 0; code < 16; ++code) codes |= (Bytes)(high == table.values[code]) & uint8_t(code);
  return codes;
}

void pack_step(const BFloat16* step, const Table& table, uint8_t* to) {
  const auto [vectors] = raw_step(reinterpret_cast<const uint8_t*>(step));
  store_bits(to, codes_of(split<1>(vectors[0], vectors[1], kBytes), table) |
                     codes_of(split<1>(vectors[2], vectors[3], kBytes), table) << 4);
  store_bits(to + 64, split<0>(vectors[0], vectors[1], kBytes));
  store_bits(to + 128, split<0>(vectors[2], vectors[3], kBytes));
}

struct PackedPanel {
  const uint8_t* data;
  const Table* tables;  // of its blocks

  // Calls `body(step, columns)` for steps [0, depth) in their order, and moves on behind them; `depth` is a whole
  // number of blocks, but at the end of the panel.
  template <typename Body>
  QUIRE_INLINE void expand(int depth, Body body) {
    for (int begin = 0; begin < depth; begin += kBlockSteps, ++tables) {
      const int end = std::min(begin + kBlockSteps, depth);
      fetch(tables + kAhead / (kBlockSteps * kPackedStepBytes));
      if (tables->is_raw()) {
        for (int step = begin; step < end; ++step, data += kStepBytes) {
          for (int line = 0; line < kStepBytes; line += 64) fetch(data + kAhead + line);
          body(step, raw_step(data));
        }
      } else {
        const Bytes table = (Bytes)_mm512_broadcast_i32x4(load_bits<__m128i>(tables->values));
        for (int step = begin; step < end; ++step, data += kPackedStepBytes) {
          for (int line = 0; line < kPackedStepBytes; line += 64) fetch(data + kAhead + line);
          body(step, expanded_step(data, table));
        }
      }
    }
  }
};

// The sums [kRows, kPanel] of the rows of one tile.
template <int kRows>
void multiply_few(PackedPanel panel, int depth, const BFloat16* x, int64_t row_stride, float* sums) {
  Floats totals[kRows][kTileVectors]{};
  panel.expand(depth, [&](int step, const Columns& columns) {
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const Floats value = Steps::broadcast(x + row * row_stride + step * Steps::kValues);
#pragma GCC unroll 4
      for (int vector = 0; vector < kTileVectors; ++vector)
        Steps::multiply_add(totals[row][vector], value, (Floats)columns.vectors[vector]);
    }
  });
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector)
      store(sums + row * kPanel + vector * kLanes, totals[row][vector]);
}

// The sums of more rows: each piece is expanded once, and meets them all.
void multiply_many(PackedPanel panel, int depth, const BFloat16* x, int64_t row_stride, int num_rows, float* sums) {
  alignas(64) BFloat16 expanded[kLongPieceSteps * kPanel * Steps::kValues];
  float ones[kJobRows];
  std::fill_n(ones, num_rows, 1.0f);
  const int piece = num_rows <= kFewPieceRows ? kPieceSteps : kLongPieceSteps;
  for (int begin = 0; begin < depth; begin += piece) {
    const int count = std::min(piece, depth - begin);
    panel.expand(count, [&](int step, const Columns& columns) {
      auto* to = expanded + step * kPanel * Steps::kValues;
      for (int vector = 0; vector < kTileVectors; ++vector)
        store_bits(to + vector * kLanes * Steps::kValues, columns.vectors[vector]);
    });
    multiply<Steps>(x + begin * Steps::kValues, int(row_stride), expanded, count, sums, kPanel,
                    begin > 0 ? ones : nullptr, num_rows, kPanel);
  }
}

void multiply_packed(PackedPanel panel, int depth, const BFloat16* x, int64_t row_stride, int num_rows, float* sums) {
  switch (num_rows) {
    case 1: return multiply_few<1>(panel, depth, x, row_stride, sums);
    case 2: return multiply_few<2>(panel, depth, x, row_stride, sums);
    case 3: return multiply_few<3>(panel, depth, x, row_stride, sums);
    case 4: return multiply_few<4>(panel, depth, x, row_stride, sums);
    default: return multiply_many(panel, depth, x, row_stride, num_rows, sums);
  }
}

// The blocks of a panel, and the steps of one of them.
int num_blocks(int64_t width) { return int((width + kBlockWidth - 1) / kBlockWidth); }
int block_steps(int64_t width, int block) {
  return int(std::min<int64_t>(kBlockWidth, width - block * kBlockWidth)) / Steps::kValues;
}

// The table of a block of `count` columns, `width` values each.
Table table_of(const BFloat16* const* columns, int count, int width) {
  bool is_there[256]{};
  for (int column = 0; column < count; ++column) {
    fetch(columns[column] + kBlockWidth);
    for (int value = 0; value < width; ++value) is_there[columns[column][value].bits >> 8] = true;
  }
  Table table{};
  int found = 0;
  for (int high = 0; high < 256; ++high) {
    if (!is_there[high]) continue;
    if (found == 16) return {{1}};  // one too many
    std::fill(table.values + found++, table.values + 16, uint8_t(high));
  }
  return table;
}

// The columns of a panel from the first value of a block on; returns how many there are.
int columns_of(const void* weight, int64_t num_columns, int64_t width, int64_t panel, int block,
               const BFloat16** columns) {
  const int count = int(std::min<int64_t>(kPanel, num_columns - panel * kPanel));
  for (int column = 0; column < count; ++column)
    columns[column] = static_cast<const BFloat16*>(weight) + (panel * kPanel + column) * width + block * kBlockWidth;
  return count;
}

}  // namespace

// Finds the tables of a weight [num_columns, width], [panels, blocks of a panel], and the bytes of each panel; `width`
// is even.
QUIRE_EXPORT void quire_lossless_tables(const void* weight, int64_t num_columns, int64_t width, void* tables,
                                        int64_t* panel_bytes) {
  quire::in_parallel((num_columns + kPanel - 1) / kPanel, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      panel_bytes[panel] = 0;
      for (int block = 0; block < num_blocks(width); ++block) {
        const BFloat16* columns[kPanel];
        const int count = columns_of(weight, num_columns, width, panel, block, columns);
        const int steps = block_steps(width, block);
        const Table table = table_of(columns, count, steps * Steps::kValues);
        static_cast<Table*>(tables)[panel * num_blocks(width) + block] = table;
        panel_bytes[panel] += steps * (table.is_raw() ? kStepBytes : kPackedStepBytes);
      }
    }
  });
}

// Packs the weight by its tables, each panel at its place in `packed`.
QUIRE_EXPORT void quire_lossless_pack(const void* weight, int64_t num_columns, int64_t width, const void* tables,
                                      const int64_t* panel_starts, void* packed) {
  quire::in_parallel((num_columns + kPanel - 1) / kPanel, 1, [&](int64_t begin, int64_t end) {
    alignas(64) BFloat16 steps[kBlockSteps * kPanel * Steps::kValues]{};  // where columns are missing, zeros
    for (int64_t panel = begin; panel < end; ++panel) {
      uint8_t* to = static_cast<uint8_t*>(packed) + panel_starts[panel];
      for (int block = 0; block < num_blocks(width); ++block) {
        const BFloat16* columns[kPanel];
        const int count = columns_of(weight, num_columns, width, panel, block, columns);
        const int num_steps = block_steps(width, block);
        pack_columns<Steps, BFloat16>(columns, 0, count, num_steps * Steps::kValues, steps);
        const Table& table = static_cast<const Table*>(tables)[panel * num_blocks(width) + block];
        if (table.is_raw()) {
          std::memcpy(to, steps, num_steps * kStepBytes);
          to += num_steps * kStepBytes;
        } else {
          for (int step = 0; step < num_steps; ++step, to += kPackedStepBytes)
            pack_step(steps + step * kPanel * Steps::kValues, table, to);
        }
      }
    }
  });
}

// Multiplies rows [num_rows, width] by a weight packed so; bias and residual may be null.
QUIRE_EXPORT void quire_lossless_linear(const void* x, int64_t row_stride, int64_t num_rows, const void* tables,
                                        const int64_t* panel_starts, const void* packed, int64_t num_columns,
                                        int64_t width, const void* bias, const void* residual, void* output) {
  const Operands operands{x, row_stride, bias, residual, output};
  for_each_job(num_rows, num_columns, [&](int panel, int64_t first, int count) {
    alignas(64) float sums[kJobRows * kPanel];
    const PackedPanel from{static_cast<const uint8_t*>(packed) + panel_starts[panel],
                           static_cast<const Table*>(tables) + int64_t(panel) * num_blocks(width)};
    multiply_packed(from, int(width / Steps::kValues), static_cast<const BFloat16*>(x) + first * row_stride, row_stride,
                    count, sums);
    finish_rows<BFloat16>(operands, int(num_columns), panel, first, count, sums);
  });
}

#endif
