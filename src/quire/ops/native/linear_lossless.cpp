// Linear layers on bfloat16 weights that take three bytes for two values, bit for bit what `quire_linear` gives where
// weights are widened.
//
// The high byte of a bfloat16 is its sign and seven bits of its exponent, and weights that lie together have few of
// them. A block of a panel, 64 columns by 32 steps, names its 16 in a table; each weight is a code of four bits into
// it, and its low byte. A block with more of them stays as it is.
//
//  panel    | block | block | raw block | ... | last block |      steps in the order of `quire_pack`
//  step     | 32 codes of two weights | 64 low bytes |            of a block with a table
//
// A code's byte and a low byte lie where one shuffle and one interleaving put them where the packed step has them.
#include "cache.h"
#include "widened.h"

#if defined(__AVX2__) && !defined(__AVX512BF16__)

namespace {

typedef uint8_t CodeBytes __attribute__((vector_size(32)));

constexpr int kBlockSteps = 32;
constexpr int kStepBytes = kWeightPanel * int(sizeof(BFloat16));
constexpr int kCodedStepBytes = 3 * int(sizeof(CodeBytes));
static_assert(kColumnGroup == sizeof(CodeBytes));  // low bytes of a group fill a vector, and so do high ones
static_assert(kWeightPanel == 2 * kColumnGroup && kDirectSteps % kBlockSteps == 0 && kWidenedSteps % kBlockSteps == 0);

// The high bytes of a block in rising order, the last one repeated; a falling pair at the ends marks a raw block.
struct Table {
  uint8_t values[16];

  bool is_raw() const { return values[0] > values[15]; }
};

// The high bytes of a group of columns.
QUIRE_INLINE CodeBytes look_up(CodeBytes table, CodeBytes codes, int group) {
  const __m256i here = _mm256_srl_epi16((__m256i)codes, _mm_cvtsi32_si128(4 * group));
  return (CodeBytes)_mm256_shuffle_epi8((__m256i)table, _mm256_and_si256(here, _mm256_set1_epi8(15)));
}

// The steps of a block with a table.
struct CodedSteps {
  const uint8_t* data;
  CodeBytes table;

  // As `PlainPanel` does.
  template <int kAhead, int kVectors>
  QUIRE_INLINE void widen(int step, int column, Floats (&values)[kVectors]) const {
    constexpr int vectors = kColumnGroup / kLanes;
    static_assert(kVectors % vectors == 0);
    const uint8_t* from = data + step * kCodedStepBytes;
#pragma GCC unroll 2
    for (int part = 0; part < kVectors / vectors; ++part) {
      const int group = column / kColumnGroup + part;
      fetch(from + kAhead * kCodedStepBytes + group * (kCodedStepBytes / 2));
      const CodeBytes high = look_up(table, load_bits<CodeBytes>(from), group);
      const CodeBytes low = load_bits<CodeBytes>(from + (1 + group) * sizeof(CodeBytes));
      const __m256i first = _mm256_unpacklo_epi8((__m256i)low, (__m256i)high);
      const __m256i second = _mm256_unpackhi_epi8((__m256i)low, (__m256i)high);
      Floats* to = values + part * vectors;
#if defined(__AVX512F__)
      const auto both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
      ColumnPair<BFloat16>::widen_both((Words)both, to[0], to[1]);
#else
      ColumnPair<BFloat16>::widen_both((Words)first, to[0], to[1]);
      ColumnPair<BFloat16>::widen_both((Words)second, to[2], to[3]);
#endif
    }
  }
};

// What is left of a panel in blocks.
struct PackedPanel {
  static constexpr int kPieceSteps = kBlockSteps;

  const uint8_t* data;
  const Table* tables;

  // Calls `body` with the steps of the next block, and moves on behind them.
  template <typename Body>
  QUIRE_INLINE void take(int depth, Body body) {
    if (tables->is_raw()) {
      body(PlainPanel<BFloat16>{reinterpret_cast<const BFloat16*>(data)});
      data += depth * kStepBytes;
    } else {
      body(CodedSteps{data, (CodeBytes)_mm256_broadcastsi128_si256(load_bits<__m128i>(tables->values))});
      data += depth * kCodedStepBytes;
    }
    ++tables;
  }
};

// Each high byte's place in a table. One that the table repeats gets the last of its places, for that has all bits.
QUIRE_INLINE CodeBytes codes_of(CodeBytes high, const Table& table) {
  CodeBytes codes{};
  for (int code = 0; code < 16; ++code) codes |= (CodeBytes)(high == table.values[code]) & uint8_t(code);
  return codes;
}

void pack_step(const BFloat16* step, const Table& table, uint8_t* to) {
  CodeBytes codes[2];
  for (int group = 0; group < 2; ++group) {
    const auto first = load_bits<__m256i>(step + group * kColumnGroup), second = load_bits<__m256i>(step + group * kColumnGroup + 16);
    const __m256i mask = _mm256_set1_epi16(255);
    const auto low = _mm256_packus_epi16(_mm256_and_si256(first, mask), _mm256_and_si256(second, mask));
    const auto high = _mm256_packus_epi16(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8));
    codes[group] = codes_of((CodeBytes)high, table);
    store_bits(to + (1 + group) * sizeof(CodeBytes), low);
  }
  store_bits(to, codes[0] | codes[1] << 4);
}

int num_blocks(int64_t width) { return int((width + kBlockSteps - 1) / kBlockSteps); }
int block_steps(int64_t width, int block) { return int(std::min<int64_t>(kBlockSteps, width - block * kBlockSteps)); }

// The table of a block of `count` columns, `depth` values each.
Table table_of(const BFloat16* const* columns, int count, int depth) {
  bool is_there[256]{};
  for (int column = 0; column < count; ++column) {
    fetch(columns[column] + kBlockSteps);
    for (int step = 0; step < depth; ++step) is_there[columns[column][step].bits >> 8] = true;
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

// Calls `body_of(panel)(block, columns, how many, steps)` for each block of a weight, the panels on all threads.
template <typename BodyOf>
void for_each_block(const void* weight, int64_t num_columns, int64_t width, BodyOf body_of) {
  quire::in_parallel(num_panels<kWeightPanel>(num_columns), 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      auto body = body_of(panel);
      const int count = int(std::min<int64_t>(kWeightPanel, num_columns - panel * kWeightPanel));
      for (int block = 0; block < num_blocks(width); ++block) {
        const BFloat16* columns[kWeightPanel];
        for (int column = 0; column < count; ++column)
          columns[column] =
              static_cast<const BFloat16*>(weight) + (panel * kWeightPanel + column) * width + block * kBlockSteps;
        body(block, columns, count, block_steps(width, block));
      }
    }
  });
}

}  // namespace

// Finds the tables of a weight [num_columns, width], [panels, blocks of a panel], and the bytes of each panel.
QUIRE_EXPORT void quire_lossless_tables(const void* weight, int64_t num_columns, int64_t width, void* tables,
                                        int64_t* panel_bytes) {
  for_each_block(weight, num_columns, width, [&](int64_t panel) {
    Table* to = static_cast<Table*>(tables) + panel * num_blocks(width);
    int64_t* num_bytes = panel_bytes + panel;
    *num_bytes = 0;
    return [=](int block, const BFloat16* const* columns, int count, int depth) {
      to[block] = table_of(columns, count, depth);
      *num_bytes += depth * (to[block].is_raw() ? kStepBytes : kCodedStepBytes);
    };
  });
}

// Packs the weight by its tables, each panel at its place in `packed`.
QUIRE_EXPORT void quire_lossless_pack(const void* weight, int64_t num_columns, int64_t width, const void* tables,
                                      const int64_t* panel_starts, void* packed) {
  for_each_block(weight, num_columns, width, [&](int64_t panel) {
    const Table* from = static_cast<const Table*>(tables) + panel * num_blocks(width);
    uint8_t* to = static_cast<uint8_t*>(packed) + panel_starts[panel];
    return [=](int block, const BFloat16* const* columns, int count, int depth) mutable {
      BFloat16 steps[kBlockSteps * kWeightPanel];
      const bool is_raw = from[block].is_raw();
      pack_pairs(columns, count, depth, is_raw ? reinterpret_cast<BFloat16*>(to) : steps);
      for (int step = 0; step < depth && !is_raw; ++step)
        pack_step(steps + step * kWeightPanel, from[block], to + step * kCodedStepBytes);
      to += depth * (is_raw ? kStepBytes : kCodedStepBytes);
    };
  });
}

// Multiplies rows [num_rows, width] by a weight packed so; bias and residual may be null.
QUIRE_EXPORT void quire_lossless_linear(const void* x, int64_t row_stride, int64_t num_rows, const void* tables,
                                        const int64_t* panel_starts, const void* packed, int64_t num_columns,
                                        int64_t width, const void* bias, const void* residual, void* output) {
  const Operands operands{x, row_stride, bias, residual, output, int(num_columns)};
  multiply_widened<BFloat16>(operands, num_rows, num_columns, int(width), [=](int64_t panel) {
    return PackedPanel{static_cast<const uint8_t*>(packed) + panel_starts[panel],
                       static_cast<const Table*>(tables) + panel * num_blocks(width)};
  });
}

#endif
