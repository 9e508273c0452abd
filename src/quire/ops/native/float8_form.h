// The form of stored weights of eight bits of floating point (e4m3: a sign, four bits of exponent, three of mantissa):
// weight = scale * value of the code.
//
// Rows are not rounded for them: each code is a bfloat16 and a float exactly, and is multiplied as one of them.
#pragma once

#include <array>
#include <memory>

#include "linear.h"

namespace {

// The numbers of all codes; 0x7f and 0xff, which are no numbers, are refused where a checkpoint is read.
constexpr std::array<float, 256> float8_values() {
  std::array<float, 256> values{};
  for (int code = 0; code < 256; ++code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    float value = float(exponent ? 8 + mantissa : mantissa) / 512.0f;
    for (int idx = 1; idx < exponent; ++idx) value *= 2.0f;
    values[code] = code < 128 ? value : -value;
  }
  return values;
}
constexpr std::array<float, 256> kFloat8Values = float8_values();

// ---- vectors of codes ----

#if defined(__AVX512BF16__)

constexpr int kFloat8StepValues = 2;  // inputs that lie side by side in a panel
constexpr float kFloat8Unit = 1.0f;   // factor of unpacked values

// Unpacks pairs of codes, one pair in each lane, to pairs of bfloat16.
QUIRE_INLINE Words unpack_float8_pairs(const uint8_t* codes) {
  // Added to a code of exponent 0, shifted to its place, to make a normal number of it; indices are its lowest bits.
  alignas(64) static constexpr uint16_t kTiny[32] = {
      0, 0x3b00 - 0x10, 0x3b80 - 0x20, 0x3bc0 - 0x30, 0x3c00 - 0x40, 0x3c20 - 0x50, 0x3c40 - 0x60, 0x3c60 - 0x70};
  const __m512i wide = _mm512_cvtepi8_epi16(load_bits<__m256i>(codes));
  const __m512i shifted = _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(int16_t(0x87f0)));
  const __mmask32 is_tiny = _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78));
  const __m512i bias = _mm512_mask_permutexvar_epi16(_mm512_set1_epi16(120 << 7), is_tiny, wide,
                                                     load_bits<__m512i>(kTiny));  // exponents are 127 too large, not 7
  return (Words)_mm512_add_epi16(shifted, bias);
}

#else

constexpr int kFloat8StepValues = 1;
constexpr float kFloat8Unit = QUIRE_LANES == 4 ? 1.0f : 256.0f;

// Unpacks the codes of two vectors; values are divided by the unit.
QUIRE_INLINE void unpack_float8(const uint8_t* codes, Floats& low, Floats& high) {
  // Shifted to its place, a code is a float16 whose exponent is 15 too large, not 7: subnormal ones as well.
#if defined(__AVX512F__)
  const __m512i wide = _mm512_slli_epi16(_mm512_cvtepi8_epi16(load_bits<__m256i>(codes)), 7);
  const __m512i halves = _mm512_and_si512(wide, _mm512_set1_epi16(int16_t(0xbf80)));
  low = (Floats)_mm512_cvtph_ps(_mm512_castsi512_si256(halves));
  high = (Floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
#elif QUIRE_LANES == 8
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_bits<__m128i>(codes)), 7);
  const __m256i halves = _mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0xbf80)));
  low = (Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  high = (Floats)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
#else
  // A code of exponent 0 is given a leading one, which is then taken off; the difference is exact.
  const auto value_of = [](Ints top) {  // of codes in the top bytes of lanes
    const Ints sign = top & int32_t(0x80000000u), magnitude = (top >> 4) & 0x07f00000;
    const Ints is_tiny = magnitude < (1 << 23);
    const Ints leading = is_tiny & bit_cast<int32_t>(0x1p-6f);
    return bit_cast<Floats>((magnitude + (120 << 23) - (is_tiny << 23)) | sign) - bit_cast<Floats>(leading | sign);
  };
#if defined(__SSE2__)
  const __m128i zero = _mm_setzero_si128(), wide = _mm_unpacklo_epi8(zero, _mm_loadl_epi64((const __m128i*)codes));
  low = value_of((Ints)_mm_unpacklo_epi16(zero, wide));
  high = value_of((Ints)_mm_unpackhi_epi16(zero, wide));
#else
  low = value_of(__builtin_convertvector(load_bits<Bytes>(codes), Ints) << 24);
  high = value_of(__builtin_convertvector(load_bits<Bytes>(codes + kLanes), Ints) << 24);
#endif
#endif
}

#endif

// The codes of a group of a panel; a `Panel` of `multiply_tile`.
template <typename Steps>
struct Float8Codes {
  const uint8_t* data;

  template <int kVectors>
  QUIRE_INLINE void take(int step, Floats (&columns)[kVectors]) const {
    const uint8_t* from = data + step * Steps::kValues / kFloat8StepValues * kFloat8StepValues * kPanel;
#if defined(__AVX512BF16__)
#pragma GCC unroll 4
    for (int vector = 0; vector < kVectors; ++vector) {
      const Words pairs = unpack_float8_pairs(from + vector * 2 * kLanes);
      columns[vector] = bit_cast<Floats>(Steps::kValues == 2 ? pairs : step % 2 ? pairs & 0xffff0000u : pairs << 16);
    }
#else
#pragma GCC unroll 2
    for (int vector = 0; vector < kVectors; vector += 2)
      unpack_float8(from + vector * kLanes, columns[vector], columns[vector + 1]);
#endif
  }
};

// The layout, with the names of `Form`. A panel is a row of groups; a group: codes, those of
// `kFloat8StepValues` inputs of a column side by side, then the float32 scales of [kPanel] columns.
template <int kGroup_>
struct Float8Form {
  using Scale = float;
  static constexpr int kBits = 8, kGroup = kGroup_;
  static constexpr bool kIsFloat8 = true, kHasMins = false, kHasZeros = false, kHasLevels = false, kIsTwoLevel = false;
  static constexpr int kScales = kGroup * kPanel;
  static constexpr int kGroupBytes = kScales + kPanel * int(sizeof(float));

  static int64_t panel_bytes(int64_t width) { return width / kGroup * kGroupBytes; }
  static const uint8_t* group_of(const uint8_t* panel, int group) { return panel + int64_t(group) * kGroupBytes; }

  static int place_of(int column, int idx) {
    constexpr int kStep = kFloat8StepValues;
    return (idx / kStep * kPanel + column) * kStep + idx % kStep;
  }
  static void put_code(uint8_t* group, int column, int idx, int code) { group[place_of(column, idx)] = uint8_t(code); }
  // Stores the codes of a group of a vector of columns, a word of four codes of a column for each four inputs.
  static QUIRE_INLINE void put_steps(uint8_t* group, int column, const Words* steps) {
    for (int word = 0; word < kGroup / 4; ++word)
      for (int idx = 0; idx < 4; idx += kFloat8StepValues) {
        const Words values = steps[word] >> (8 * idx);
        uint8_t* to = group + place_of(column, 4 * word + idx);
        if constexpr (kFloat8StepValues == 2)
          store_bits(to, narrow_words(values));
        else
          store_bits(to, __builtin_convertvector(values, Bytes));
      }
  }

  static int code_at(const uint8_t* group, int column, int idx) { return group[place_of(column, idx)]; }
};

// ---- products ----

// Adds to the sums of a tile, [rows, kPanel], what they get from a group.
template <int kRows>
QUIRE_INLINE void add_scaled(const float* parts, const float* scales, float* sums) {
#pragma GCC unroll 4
  for (int column = 0; column < kPanel; column += kLanes) {
    const Floats scale = load(scales + column) * kFloat8Unit;
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      float* sum = sums + row * kPanel + column;
      store(sum, load(sum) + load(parts + row * kPanel + column) * scale);
    }
  }
}

// Sums [num_rows, kPanel] of rows and the columns of one panel.
template <typename Form, typename Steps>
void multiply_float8_panel(const typename Steps::Value* x, int stride, int width, const uint8_t* panel, int num_rows,
                           float* sums) {
  constexpr int kDepth = Form::kGroup / Steps::kValues;
  constexpr int kAhead = std::max(8192, Form::kGroupBytes);  // bytes from what is multiplied to what is prefetched
  alignas(64) typename Steps::Value unpacked[Form::kGroup * kPanel];
  alignas(64) float parts[kTileRows * kPanel];
  std::fill_n(sums, num_rows * kPanel, 0.0f);
  for (int idx = 0; idx < width; idx += Form::kGroup, panel += Form::kGroupBytes) {
    const Float8Codes<Steps> codes{panel};
    const bool is_unpacked = num_rows > kTileRows;  // once for several tiles
    for (int step = 0; is_unpacked && step < kDepth; ++step) {
      Floats columns[kTileVectors];
      codes.take(step, columns);
      for (int vector = 0; vector < kTileVectors; ++vector)
        store_bits(unpacked + (step * kPanel + vector * kLanes) * Steps::kValues, columns[vector]);
    }
    in_tiles<kTileRows>(num_rows, [&](int row, auto rows) {
      const PanelPrefetch ahead(panel + kAhead, Form::kGroupBytes, kDepth, row, rows.value, num_rows);
      const StridedRows<Steps> values{x + int64_t(row) * stride + idx, stride};
      const auto multiply = [&](const auto& steps) {
        multiply_tile<Steps, rows.value, kTileVectors>(values, steps, kDepth, parts, kPanel, nullptr, ahead);
      };
      if (is_unpacked)
        multiply(PanelSteps<Steps>{unpacked});
      else
        multiply(codes);
      add_scaled<rows.value>(parts, reinterpret_cast<const float*>(panel + Form::kScales), sums + row * kPanel);
    });
  }
}

// Multiplies rows by a weight of the form, and finishes them.
template <typename Form, typename T>
void multiply_float8(const Operands& operands, int64_t num_rows, int width, const uint8_t* panels) {
  using Steps = typename StepsOf<T>::Type;
  using Value = typename Steps::Value;
  const Value* x;
  int64_t stride = operands.row_stride;
  std::unique_ptr<Value[]> rows;
  if constexpr (std::is_same_v<T, Value>) {
    x = static_cast<const Value*>(operands.x);
  } else {
    rows.reset(new Value[num_rows * width]);
    widen_rows(static_cast<const T*>(operands.x), stride, num_rows, width, rows.get());
    x = rows.get();
    stride = width;
  }
  in_blocks<kPanel>(operands.num_columns, num_rows, [&](int number, int64_t first, int count) {
    alignas(64) float sums[kJobRows * kPanel];
    multiply_float8_panel<Form, Steps>(x + first * stride, int(stride), width,
                                       panels + number * Form::panel_bytes(width), count, sums);
    for (int row = 0; row < count; ++row) finish<T>(sums + row * kPanel, operands, first + row, number);
  });
}

}  // namespace
