// Linear layers whose weights are rounded, when they are loaded, to four or six bits with one bfloat16 scale for each
// group of 32 inputs.
#include <cmath>

#include "grouped_rows.h"

namespace {

template <int kBits>
using RoundedForm = Form<kBits, 32, BFloat16>;

// Added to weights, which makes codes of them.
template <int kBits>
constexpr int kOffset = 1 << (kBits - 1);

// Rounds a group to -8..7 or -32..31, and returns its scale. The value of the largest magnitude becomes the lowest
// integer, because the range has one more integer below zero than above.
template <int kBits, typename T>
BFloat16 round_group(const T* from, int8_t* to) {
  std::memset(to, 0, RoundedForm<kBits>::kGroup);
  BFloat16 scale{0};
  float largest = 0.0f;
  bool is_finite = true;
  for (int idx = 0; idx < RoundedForm<kBits>::kGroup; ++idx) {
    const float value = widen(from[idx]);
    if (std::abs(value) > std::abs(largest)) largest = value;
    is_finite = is_finite && std::abs(value) < kInfinity;
  }
  if (is_finite && std::abs(largest) < kSmallest) return scale;
  narrow(&scale, is_finite ? largest / -float(kOffset<kBits>) : kNaN);
  const float step = widen(scale);
  if (std::abs(step) < kInfinity)
    for (int idx = 0; idx < RoundedForm<kBits>::kGroup; ++idx)
      to[idx] =
          int8_t(std::min(std::max(nearest(splat(widen(from[idx]) / step))[0], -kOffset<kBits>), kOffset<kBits> - 1));
  return scale;
}

template <int kBits>
void pack(Type type, const void* weight, int64_t num_columns, int64_t width, bool is_gated, void* packed) {
  using Form = RoundedForm<kBits>;
  with_type(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const auto* from = static_cast<const T*>(weight);
    quire::in_parallel(num_panels(int(num_columns)), 1, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        const int count = int(std::min<int64_t>(kPanel, num_columns - panel * kPanel));
        // The padding is not written: sums that depend on it are never read.
        for (int column = 0; column < count; ++column) {
          const T* row = from + column_of<kPanel>(panel, column, num_columns, is_gated) * width;
          uint8_t* to = static_cast<uint8_t*>(packed) + panel * Form::panel_bytes(width);
          for (int64_t idx = 0; idx < width; idx += Form::kGroup, to += Form::kGroupBytes) {
            int8_t values[Form::kGroup];
            reinterpret_cast<BFloat16*>(to + Form::kScales)[column] = round_group<kBits>(row + idx, values);
            for (int value = 0; value < Form::kGroup; ++value)
              Form::put_code(to, column, value, values[value] + kOffset<kBits>);
          }
        }
      }
    });
  });
}

template <int kBits>
void multiply(Type type, const Operands& operands, int64_t num_rows, const void* packed, int64_t width) {
  with_type(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    multiply_grouped<RoundedForm<kBits>, T>(operands, num_rows, int(width),
                                            {static_cast<const uint8_t*>(packed), nullptr, kOffset<kBits>});
  });
}

}  // namespace

// For four and for six bits: the number of bytes of a packed weight, whose `width` is a multiple of 32; the function
// that rounds and packs a weight [num_columns, width]; and the function that multiplies rows [num_rows, width] by it,
// where bias and residual may be null.
#define QUIRE_GROUPED(name, kBits)                                                                                   \
  QUIRE_EXPORT int64_t quire_bytes_##name(int64_t num_columns, int64_t width) {                                      \
    return num_panels(int(num_columns)) * RoundedForm<kBits>::panel_bytes(width);                                    \
  }                                                                                                                  \
  QUIRE_EXPORT void quire_pack_##name(int64_t type, const void* weight, int64_t num_columns, int64_t width,          \
                                      bool is_gated, void* packed) {                                                 \
    pack<kBits>(Type(type), weight, num_columns, width, is_gated, packed);                                           \
  }                                                                                                                  \
  QUIRE_EXPORT void quire_linear_##name(Type type, const void* x, int64_t row_stride, int64_t num_rows,              \
                                        const void* packed, int64_t num_columns, int64_t width, const void* bias,    \
                                        const void* residual, Activation gate, void* output) {                       \
    multiply<kBits>(type, {x, row_stride, bias, residual, output, int(num_columns), gate}, num_rows, packed, width); \
  }

QUIRE_GROUPED(int4, 4)
QUIRE_GROUPED(int6, 6)
