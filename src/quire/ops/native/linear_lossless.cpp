// Linear layers with losslessly compressed weights; their results are bit for bit those of `quire_linear`.
#include "cache.h"
#include "dict_packed_bf16.h"
#include "dpbf16.h"
#include "upcast_weights.h"

#if defined(__AVX2__)

namespace {

#if defined(__AVX512BF16__)

struct CodedPairs : CodedSteps {
  const Table* tables;  // table of each block

  // Interface of `PanelSteps`.
  QUIRE_INLINE void take(int step, Floats (&columns)[kTileVectors]) const {
    const CodeBytes table = table_bytes(tables[step / kBlockSteps].values);
#pragma GCC unroll 2
    for (int group = 0; group < 2; ++group) {
      CodeBytes first, second;
      CodedSteps::take(step, table, group, first, second);
      columns[2 * group] = bit_cast<Floats>(first);
      columns[2 * group + 1] = bit_cast<Floats>(second);
    }
  }
};

// Remaining blocks of a panel.
struct CodedPanel {
  const uint8_t* data;
  const Table* tables;

  // Interface of `PlainPairs`.
  void multiply(PairRows rows, int step, int depth) {
    while (depth > 0) {
      int count = 0;  // number of steps before the first raw block
      for (const Table* table = tables; count < depth && !table->is_raw(); ++table) count += kBlockSteps;
      count = std::min(count, depth);
      if (count > 0) {
        const CodedPairs blocks{{data}, tables};
        tables += (count + kBlockSteps - 1) / kBlockSteps;
        data += count * kCodedStepBytes;
        rows.multiply(step, blocks, count, data, count * kCodedStepBytes);
      } else {
        count = std::min(kBlockSteps, depth);
        ++tables;
        PlainPairs raw{reinterpret_cast<const BFloat16*>(data)};
        raw.multiply(rows, step, count);
        data += count * kStepBytes;
      }
      rows.is_begun = true;
      step += count;
      depth -= count;
    }
  }
};

template <typename PanelAt>
void multiply_coded(const Operands& operands, int64_t num_rows, int64_t num_columns, int width, PanelAt panel_at) {
  multiply_pairs(operands, num_rows, num_columns, width, panel_at);
}

using PlainWeight = PairedWeight;

#else

static_assert(kColumnGroup == sizeof(CodeBytes));  // the low bytes of a group fill one vector, as do the high ones
static_assert(kDirectSteps % kBlockSteps == 0);

struct CodedColumns : CodedSteps {
  CodeBytes table;

  // Interface of `PlainPanel`.
  template <int kAhead, int kVectors>
  QUIRE_INLINE void widen(int step, int column, Floats (&values)[kVectors]) const {
    constexpr int vectors = kColumnGroup / kLanes;
    static_assert(kVectors % vectors == 0);
#pragma GCC unroll 2
    for (int part = 0; part < kVectors / vectors; ++part) {
      const int group = column / kColumnGroup + part;
      fetch(data + (step + kAhead) * kCodedStepBytes + group * (kCodedStepBytes / 2));
      CodeBytes first, second;
      take(step, table, group, first, second);
      Floats* to = values + part * vectors;
#if defined(__AVX512F__)
      const auto both = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)first), (__m256i)second, 1);
      ColumnPair<BFloat16>::widen_both((Words)both, to[0], to[1]);
#else
      ColumnPair<BFloat16>::widen_both((Words)first, to[0], to[1]);
      ColumnPair<BFloat16>::widen_both((Words)second, to[2], to[3]);
#endif
    }
  }
};

// Remaining blocks of a panel.
struct CodedPanel {
  static constexpr int kPieceSteps = kBlockSteps;
  static constexpr int kUnpackedSteps = 64;  // 8 KiB, beside the codes
  static constexpr int kDirectRows = 3;

  const uint8_t* data;
  const Table* tables;

  // Calls `body` with the steps of the next block, and advances past them.
  template <typename Body>
  QUIRE_INLINE void take(int depth, Body body) {
    if (tables->is_raw()) {
      body(PlainPanel<BFloat16>{reinterpret_cast<const BFloat16*>(data)});
      data += depth * kStepBytes;
    } else {
      body(CodedColumns{{data}, table_bytes(tables->values)});
      data += depth * kCodedStepBytes;
    }
    ++tables;
  }

  // Interface of `PlainPanel`: unpacks whole blocks to a buffer, and prefetches meanwhile.
  const BFloat16* unpack(int depth, BFloat16* to, const uint8_t*& ahead, int& num_ahead) {
    BFloat16* const buffer = to;
    for (int step = 0; step < depth; step += kBlockSteps) {
      const int count = std::min(kBlockSteps, depth - step);
      if (tables->is_raw()) {
        std::memcpy(to, data, count * kStepBytes);
        to += count * kWeightPanel;
        data += count * kStepBytes;
      } else {
        const CodeBytes table = table_bytes(tables->values);
        for (int idx = 0; idx < count; ++idx, data += kCodedStepBytes, to += kWeightPanel) {
          fetch(data + kUnpackedSteps * kCodedStepBytes);
          fetch(data + kUnpackedSteps * kCodedStepBytes + kCodedStepBytes / 2);
#pragma GCC unroll 2
          for (int group = 0; group < 2; ++group) {
            CodeBytes first, second;
            CodedSteps{data}.take(0, table, group, first, second);
            store_bits(to + group * kColumnGroup, first);
            store_bits(to + group * kColumnGroup + kColumnGroup / 2, second);
          }
        }
      }
      ++tables;
    }
    ahead = data;
    num_ahead = 0;
    return buffer;
  }
};

template <typename PanelAt>
void multiply_coded(const Operands& operands, int64_t num_rows, int64_t num_columns, int width, PanelAt panel_at) {
  multiply_widened<BFloat16>(operands, num_rows, num_columns, width, panel_at);
}

using PlainWeight = WidenedWeight<BFloat16>;

#endif

int num_blocks(int64_t width) { return int((width + kBlockValues - 1) / kBlockValues); }
int block_values(int64_t width, int block) {
  return int(std::min<int64_t>(kBlockValues, width - block * kBlockValues));
}
int64_t block_bytes(const Table& table, int num_values) {
  return num_values / kStepValues * (table.is_raw() ? kStepBytes : kCodedStepBytes);
}

// Calls `body_of(panel)(block, columns, number of columns, values per column)` for each block of a weight, the panels
// on all threads.
template <typename BodyOf>
void for_each_block(const void* weight, int64_t num_columns, int64_t width, bool is_gated, BodyOf body_of) {
  quire::in_parallel(num_panels<kWeightPanel>(num_columns), 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      auto body = body_of(panel);
      const int count = int(std::min<int64_t>(kWeightPanel, num_columns - panel * kWeightPanel));
      for (int block = 0; block < num_blocks(width); ++block) {
        const BFloat16* columns[kWeightPanel];
        for (int column = 0; column < count; ++column)
          columns[column] = static_cast<const BFloat16*>(weight) +
                            column_of<kWeightPanel>(panel, column, num_columns, is_gated) * width +
                            block * kBlockValues;
        body(block, columns, count, block_values(width, block));
      }
    }
  });
}

}  // namespace

// Computes the tables of a weight [num_columns, width], [panels, blocks of a panel], and the number of bytes of each
// panel.
QUIRE_EXPORT void quire_lossless_tables(const void* weight, int64_t num_columns, int64_t width, bool is_gated,
                                        void* tables, int64_t* panel_bytes) {
  for_each_block(weight, num_columns, width, is_gated, [&](int64_t panel) {
    Table* to = static_cast<Table*>(tables) + panel * num_blocks(width);
    int64_t* num_bytes = panel_bytes + panel;
    *num_bytes = 0;
    return [=](int block, const BFloat16* const* columns, int count, int depth) {
      to[block] = table_of(columns, count, depth);
      *num_bytes += block_bytes(to[block], depth);
    };
  });
}

// Packs the weight by its tables, each panel from its start in `packed` on.
QUIRE_EXPORT void quire_lossless_pack(const void* weight, int64_t num_columns, int64_t width, bool is_gated,
                                      const void* tables, const int64_t* panel_starts, void* packed) {
  for_each_block(weight, num_columns, width, is_gated, [&](int64_t panel) {
    const Table* from = static_cast<const Table*>(tables) + panel * num_blocks(width);
    uint8_t* to = static_cast<uint8_t*>(packed) + panel_starts[panel];
    return [=](int block, const BFloat16* const* columns, int count, int depth) mutable {
      alignas(64) BFloat16 steps[kBlockValues * kWeightPanel]{};
      const bool is_raw = from[block].is_raw();
      PlainWeight::pack(columns, count, depth, is_raw ? reinterpret_cast<BFloat16*>(to) : steps);
      for (int step = 0; step < depth / kStepValues && !is_raw; ++step)
        pack_step(steps + step * kStepValues * kWeightPanel, from[block], to + step * kCodedStepBytes);
      to += block_bytes(from[block], depth);
    };
  });
}

// A packed weight. Functions that take one have the signatures of the other formats.
struct LosslessWeight {
  const Table* tables;
  const int64_t* panel_starts;
  const uint8_t* panels;

  CodedPanel panel(int64_t idx, int64_t width) const {
    return CodedPanel{panels + panel_starts[idx], tables + idx * num_blocks(width)};
  }
};

// Multiplies rows [num_rows, width] of bfloat16 by a packed weight; bias and residual may be null.
QUIRE_EXPORT void quire_lossless_linear(Type, const void* x, int64_t row_stride, int64_t num_rows, const void* packed,
                                        int64_t num_columns, int64_t width, const void* bias, const void* residual,
                                        Activation gate, void* output) {
  const LosslessWeight weight = *static_cast<const LosslessWeight*>(packed);
  const Operands operands{x, row_stride, bias, residual, output, int(num_columns), gate};
  multiply_coded(operands, num_rows, num_columns, int(width),
                 [=](int64_t panel) { return weight.panel(panel, width); });
}

// Copies columns of a packed weight: ids [num_ids] to output [num_ids, width]. Returns false for an ID out of range.
QUIRE_EXPORT bool quire_lossless_rows(Type, const void* packed, int64_t num_columns, int64_t width, const int64_t* ids,
                                      int64_t num_ids, void* output) {
  const LosslessWeight weight = *static_cast<const LosslessWeight*>(packed);
  return for_each_column(ids, num_ids, num_columns, [&](int64_t panel, int column, int64_t idx) {
    const Table* table = weight.tables + panel * num_blocks(width);
    const uint8_t* from = weight.panels + weight.panel_starts[panel];
    auto* to = static_cast<BFloat16*>(output) + idx * width;
    const int place = PlainWeight::place_of(column);
    for (int block = 0; block < num_blocks(width); ++block, ++table) {
      for (int step = 0; step < block_values(width, block) / kStepValues; ++step) {
        for (int value = 0; value < kStepValues; ++value, ++to) {
          if (table->is_raw()) {
            std::memcpy(to, from + (place + value) * sizeof(BFloat16), sizeof(BFloat16));
          } else {
            *to = CodedValue(place + value).of(from, *table);
          }
        }
        from += table->is_raw() ? kStepBytes : kCodedStepBytes;
      }
    }
  });
}

#endif
