// bfloat16 weights compressed to three bytes for two values.
//
// The high byte of a bfloat16 is its sign and seven bits of its exponent, and neighbouring weights have few different
// ones. A table lists up to 16 high bytes of a block of a panel, 64 columns by 32 values; each weight is stored as a
// code of four bits, its index in the table, and its low byte. A block with more than 16 high bytes is stored raw.
//
//  panel    | block | block | raw block | ... | last block |      steps in the order of `quire_pack`
//  step     | a vector of bytes, two codes each | two vectors of low bytes |      of a block with a table
//
// The order of codes and low bytes lets one shuffle and one interleaving produce the packed step.
#pragma once

#include "linear.h"

#if defined(__AVX2__)

namespace {

#if defined(__AVX512BF16__)

constexpr int kStepValues = 2;  // values per column
typedef uint8_t CodeBytes __attribute__((vector_size(64)));

QUIRE_INLINE CodeBytes look_up(CodeBytes table, CodeBytes codes) {
  return (CodeBytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
}
QUIRE_INLINE CodeBytes table_bytes(const uint8_t* values) {
  return (CodeBytes)_mm512_broadcast_i32x4(load_bits<__m128i>(values));
}
QUIRE_INLINE CodeBytes interleave_low(CodeBytes a, CodeBytes b) {
  return (CodeBytes)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b);
}
QUIRE_INLINE CodeBytes interleave_high(CodeBytes a, CodeBytes b) {
  return (CodeBytes)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b);
}
QUIRE_INLINE CodeBytes join_words(CodeBytes a, CodeBytes b) {
  return (CodeBytes)_mm512_packus_epi16((__m512i)a, (__m512i)b);
}

#else

constexpr int kStepValues = 1;
typedef uint8_t CodeBytes __attribute__((vector_size(32)));

QUIRE_INLINE CodeBytes look_up(CodeBytes table, CodeBytes codes) {
  return (CodeBytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
}
QUIRE_INLINE CodeBytes table_bytes(const uint8_t* values) {
  return (CodeBytes)_mm256_broadcastsi128_si256(load_bits<__m128i>(values));
}
QUIRE_INLINE CodeBytes interleave_low(CodeBytes a, CodeBytes b) {
  return (CodeBytes)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b);
}
QUIRE_INLINE CodeBytes interleave_high(CodeBytes a, CodeBytes b) {
  return (CodeBytes)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b);
}
QUIRE_INLINE CodeBytes join_words(CodeBytes a, CodeBytes b) {
  return (CodeBytes)_mm256_packus_epi16((__m256i)a, (__m256i)b);
}

#endif

typedef uint16_t CodeWords __attribute__((vector_size(sizeof(CodeBytes))));

constexpr int kBlockValues = 32;  // values per column
constexpr int kBlockSteps = kBlockValues / kStepValues;
constexpr int kStepBytes = kStepValues * kWeightPanel * int(sizeof(BFloat16));
constexpr int kCodedStepBytes = 3 * int(sizeof(CodeBytes));
static_assert(kStepBytes ==
              4 * sizeof(CodeBytes));  // two groups, each of two vectors: of values, or of low and of high bytes

// The high bytes of a block, and possibly others, in ascending order, the last one repeated. In a raw block's table the
// first value exceeds the last.
struct Table {
  uint8_t values[16];

  bool is_raw() const { return values[0] > values[15]; }
};

// Steps of blocks with tables.
struct CodedSteps {
  const uint8_t* data;

  // Decodes the values of a group of columns, in the order of a packed step.
  QUIRE_INLINE void take(int step, CodeBytes table, int group, CodeBytes& first, CodeBytes& second) const {
    const uint8_t* from = data + step * kCodedStepBytes;
    const CodeBytes codes = (CodeBytes)(load_bits<CodeWords>(from) >> (4 * group)) & 15;
    const CodeBytes high = look_up(table, codes), low = load_bits<CodeBytes>(from + (1 + group) * sizeof(CodeBytes));
    first = interleave_low(low, high);
    second = interleave_high(low, high);
  }
};

// Location of a packed step's value within a coded step.
class CodedValue {
 public:
  // place: index of the value in the packed step.
  explicit CodedValue(int place) {
    constexpr int kVectorWords = sizeof(CodeBytes) / 2, kLaneWords = 8;  // words are joined in lanes of 16 bytes
    const int vector = place / kVectorWords, word = place % kVectorWords;
    group_ = vector / 2;
    byte_ = word / kLaneWords * 16 + vector % 2 * kLaneWords + word % kLaneWords;
  }

  BFloat16 of(const uint8_t* step, const Table& table) const {
    const uint8_t high = table.values[(step[byte_] >> (4 * group_)) & 15];
    return {uint16_t(high << 8 | step[(1 + group_) * sizeof(CodeBytes) + byte_])};
  }

 private:
  int group_, byte_;
};

// Codes a packed step by a table that contains all its high bytes.
inline void pack_step(const BFloat16* step, const Table& table, uint8_t* to) {
  CodeBytes codes[2];
  for (int group = 0; group < 2; ++group) {
    const uint8_t* from = reinterpret_cast<const uint8_t*>(step) + 2 * group * sizeof(CodeBytes);
    const auto first = load_bits<CodeWords>(from), second = load_bits<CodeWords>(from + sizeof(CodeBytes));
    const CodeBytes high = join_words((CodeBytes)(first >> 8), (CodeBytes)(second >> 8));
    // Indices are combined by OR: a byte that the table repeats gets index 15, the last one, which has all bits.
    codes[group] = CodeBytes{};
    for (int code = 0; code < 16; ++code) codes[group] |= (CodeBytes)(high == table.values[code]) & uint8_t(code);
    store_bits(to + (1 + group) * sizeof(CodeBytes), join_words((CodeBytes)(first & 255), (CodeBytes)(second & 255)));
  }
  store_bits(to, codes[0] | codes[1] << 4);
}

// Fills the table with eight neighbouring exponents of either sign, which suffices for nearly all blocks and takes a
// fraction of the time of examining each value. Returns whether the table contains all high bytes of a block with full
// columns.
inline bool find_neighbours(const BFloat16* const* columns, int count, Table& table) {
  constexpr int kWords = sizeof(HalfPairs) / sizeof(uint16_t);
  HalfPairs least = HalfPairs{} + uint16_t(0x7fff), most{};
  for (int column = 0; column < count; ++column) {
    fetch(columns[column] + kBlockValues);
    for (int idx = 0; idx < kBlockValues; idx += kWords) {
      const HalfPairs magnitudes = load_bits<HalfPairs>(columns[column] + idx) & uint16_t(0x7fff);
      least = magnitudes < least ? magnitudes : least;
      most = magnitudes > most ? magnitudes : most;
    }
  }
  int lowest = 127, highest = 0;
  for (int lane = 0; lane < kWords; ++lane) {
    lowest = std::min(lowest, least[lane] >> 8);
    highest = std::max(highest, most[lane] >> 8);
  }
  lowest = std::min(lowest, 128 - 8);
  for (int code = 0; code < 16; ++code) table.values[code] = uint8_t(code / 8 * 128 + lowest + code % 8);
  return highest < lowest + 8;
}

// Returns the table of a block of `count` columns, `depth` values each.
inline Table table_of(const BFloat16* const* columns, int count, int depth) {
  Table table{};
  if (depth == kBlockValues && find_neighbours(columns, count, table)) return table;
  bool is_there[256]{};
  for (int column = 0; column < count; ++column) {
    for (int idx = 0; idx < depth; ++idx) is_there[columns[column][idx].bits >> 8] = true;
  }
  int found = 0;
  for (int high = 0; high < 256; ++high) {
    if (!is_there[high]) continue;
    if (found == 16) return {{1}};  // more than 16: raw
    std::fill(table.values + found++, table.values + 16, uint8_t(high));
  }
  return table;
}

}  // namespace

#endif
