// Weights that are rounded, when they are loaded, to a form of codes of few bits with a scale for each group of inputs.
#include <cmath>

#include "grouped_form.h"

namespace {

// Rounds a group to integers of the form's bits, -8..7 for four, and returns its scale. The value of
// the largest magnitude becomes the lowest integer, because the range has one more integer below zero than above.
//
// codes: gets the integers with the offset that makes the lowest one zero; those past `count` are zeros.
template <typename Form, typename T>
BFloat16 round_group(const T* from, int count, uint8_t* codes) {
  constexpr int kOffset = 1 << (Form::kBits - 1);
  std::memset(codes, kOffset, Form::kGroup);
  BFloat16 scale{0};
  float largest = 0.0f;
  bool is_finite = true;
  for (int idx = 0; idx < count; ++idx) {
    const float value = widen(from[idx]);
    if (std::abs(value) > std::abs(largest)) largest = value;
    is_finite = is_finite && std::abs(value) < kInfinity;
  }
  if (is_finite && std::abs(largest) < kSmallest) return scale;
  narrow(&scale, is_finite ? largest / -float(kOffset) : kNaN);
  const float step = widen(scale);
  if (std::abs(step) < kInfinity)
    for (int idx = 0; idx < count; ++idx) {
      const int level = nearest(splat(widen(from[idx]) / step))[0];
      codes[idx] = uint8_t(std::min(std::max(level, -kOffset), kOffset - 1) + kOffset);
    }
  return scale;
}

template <typename Form, typename T>
void pack_rounded(const T* weight, int64_t num_columns, int64_t width, bool is_gated, uint8_t* panels) {
  quire::in_parallel(num_panels(int(num_columns)), 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int count = int(std::min<int64_t>(kPanel, num_columns - panel * kPanel));
      // The padding is not written: sums that depend on it are never read.
      for (int column = 0; column < count; ++column) {
        const T* row = weight + column_of<kPanel>(panel, column, num_columns, is_gated) * width;
        uint8_t* to = panels + panel * Form::panel_bytes(width);
        for (int64_t idx = 0; idx < width; idx += Form::kGroup, to += Form::kGroupBytes) {
          uint8_t codes[Form::kGroup];
          const int num_values = int(std::min<int64_t>(Form::kGroup, width - idx));
          reinterpret_cast<BFloat16*>(to + Form::kScales)[column] = round_group<Form>(row + idx, num_values, codes);
          for (int value = 0; value < Form::kGroup; ++value) Form::put_code(to, column, value, codes[value]);
        }
      }
    }
  });
}

}  // namespace

// Rounds a weight [num_columns, width] to a form with scales of bfloat16, and packs it into panels. For another form,
// returns false without writing anything.
QUIRE_EXPORT bool quire_pack_rounded(int64_t form, Type type, const void* weight, int64_t num_columns, int64_t width,
                                     bool is_gated, uint8_t* panels) {
  bool is_rounded = false;
  with_form(form, [&](auto* null) {
    using Form = std::remove_pointer_t<decltype(null)>;
    if constexpr (!Form::kIsFloat8 && !Form::kHasLevels && !Form::kHasMins && !Form::kHasZeros) {
      if constexpr (std::is_same_v<typename Form::Scale, BFloat16>) {
        is_rounded = true;
        with_type(type, [&](auto* as) {
          using T = std::remove_pointer_t<decltype(as)>;
          pack_rounded<Form>(static_cast<const T*>(weight), num_columns, width, is_gated, panels);
        });
      }
    }
  });
  return is_rounded;
}
