// Forms of weights of few bits whose groups of inputs share a scale: their layout in panels, and how codes are
// unpacked.
//
// weight = scale * level - minimum, where the level is the code less an offset, less the group's zero point, or an
// entry of a table. See quire/ops/interface/quantized_weight.py.
#pragma once

#include "float8_form.h"
#include "int8_activations.h"

namespace {

constexpr int kSuperGroup = 256;                 // inputs that share a super-scale
constexpr int kStepPanel = kPanel * kStepBytes;  // bytes of a step of a panel, at a byte a code

// kBits: 4, 5, 6 or 8. kGroup: inputs that share a scale.
// Scale: Float16, BFloat16 or float; int8_t for scales of float16 super-scales.
// kHasMins: minima, of the dtype of scales, or uint8 of float16 super-minima. kHasZeros: zero points, a byte each.
// kHasLevels: codes are indices of a table of 16 values.
//
// A panel is a row of groups; of two levels, the super-scales and super-minima of [kPanel] columns stand behind the
// groups of 256 inputs. A group: its codes; then [kPanel] scales, minima, zero points. For each pair of steps, the
// lower four bits of the first in the lower halves of bytes, those of the second in the upper halves. Of five bits, the
// fifth of step s is bit s of a byte. Of six bits, the upper two of four steps share a byte: the first step has them in
// bits 4 and 5, where they are wanted, the second in 6 and 7, the third in 0 and 1, the fourth in 2 and 3. Upper bits
// stand behind the first pair that they belong to. Codes of eight bits lie step by step. So a panel is read front to
// back: hardware prefetches what is read in that order.
template <int kBits_, int kGroup_, typename Scale_, bool kHasMins_ = false, bool kHasZeros_ = false,
          bool kHasLevels_ = false>
struct Form {
  using Scale = Scale_;
  static constexpr int kBits = kBits_, kGroup = kGroup_;
  static constexpr bool kIsFloat8 = false, kHasMins = kHasMins_, kHasZeros = kHasZeros_, kHasLevels = kHasLevels_;
  static constexpr bool kIsTwoLevel = std::is_same_v<Scale, int8_t>;

  static constexpr int kSteps = kGroup / kStepBytes, kPairs = kSteps / 2;
  static constexpr int kSuperGroups = kSuperGroup / kGroup;
  static constexpr int kSuperBytes = kIsTwoLevel ? kPanel * int(sizeof(Float16)) * (kHasMins ? 2 : 1) : 0;
  static constexpr int kTopBlocks = kBits == 5 ? 1 : kBits == 6 ? kSteps / 4 : 0;
  static constexpr int kScales = ((kBits == 8 ? kSteps : kPairs) + kTopBlocks) * kStepPanel;
  static constexpr int kMins = kScales + kPanel * int(sizeof(Scale));
  static constexpr int kZeros = kMins + (kHasMins ? kPanel * int(sizeof(Scale)) : 0);
  static constexpr int kGroupBytes = kZeros + (kHasZeros ? kPanel : 0);
  static_assert(kBits != 5 || kSteps == 8);

  // Codes are bytes without a sign; where bytes of the instruction set have one, those of eight bits lose 128.
  static constexpr int kShift = kBits == 8 ? kWeightOffset - 128 : 0;

  // The last group of a weight of one level may be padded.
  static int num_groups(int64_t width) { return int((width + kGroup - 1) / kGroup); }
  static int64_t panel_bytes(int64_t width) { return bytes_of(num_groups(width)); }

  // Where the lower four bits of a pair of steps lie in a group, and its upper bits.
  static constexpr int codes_of(int pair) {
    const int tops_before = kBits == 5 ? pair > 0 : kBits == 6 ? (pair + 1) / 2 : 0;
    return (pair + tops_before) * kStepPanel;
  }
  static constexpr int tops_of(int pair) { return codes_of(kBits == 6 ? pair / 2 * 2 : 0) + kStepPanel; }

  // Bytes of groups, a whole number of super-groups.
  static int64_t bytes_of(int num_groups) {
    return int64_t(num_groups) * kGroupBytes + (kIsTwoLevel ? num_groups / kSuperGroups * kSuperBytes : 0);
  }

  // Where a group lies, and its super-scales.
  static const uint8_t* group_of(const uint8_t* panel, int group) {
    return panel + int64_t(group) * kGroupBytes + group / kSuperGroups * kSuperBytes;
  }
  static const uint8_t* super_of(const uint8_t* panel, int group) {
    return panel + int64_t(group / kSuperGroups) * bytes_of(kSuperGroups) + kSuperGroups * kGroupBytes;
  }

  // ---- vectors of columns ----

  // The codes of a pair of steps, a byte each.
  static QUIRE_INLINE void unpack_pair(const uint8_t* group, int pair, int vector, Ints& first, Ints& second) {
    constexpr int32_t kLow = 0x0f0f0f0f, kFifth = 0x01010101, kTop = 0x30303030;
    const int at = vector * kLanes * kStepBytes;
    if constexpr (kBits == 8) {
      first = load_bits<Ints>(group + 2 * pair * kStepPanel + at);
      second = load_bits<Ints>(group + (2 * pair + 1) * kStepPanel + at);
      return;
    }
    const Ints both = load_bits<Ints>(group + codes_of(pair) + at);
    first = both & kLow;
    second = (both >> 4) & kLow;
    if constexpr (kBits == 5) {
      const Ints tops = load_bits<Ints>(group + tops_of(pair) + at) >> (2 * pair);
      first |= (tops & kFifth) << 4;
      second |= ((tops >> 1) & kFifth) << 4;
    }
    if constexpr (kBits == 6) {
      const Ints tops = load_bits<Ints>(group + tops_of(pair) + at) << (pair % 2 * 4);
      first |= tops & kTop;
      second |= (tops >> 2) & kTop;
    }
  }

  static QUIRE_INLINE Floats scales(const uint8_t* group, int vector) {
    return load(reinterpret_cast<const Scale*>(group + kScales) + vector * kLanes);
  }
  // Minima of two levels are bytes below 128.
  static QUIRE_INLINE Floats mins(const uint8_t* group, int vector) {
    return load(reinterpret_cast<const Scale*>(group + kMins) + vector * kLanes);
  }

  static QUIRE_INLINE Floats super_scales(const uint8_t* super, int vector) {
    return load(reinterpret_cast<const Float16*>(super) + vector * kLanes);
  }
  static QUIRE_INLINE Floats super_mins(const uint8_t* super, int vector) {
    return load(reinterpret_cast<const Float16*>(super) + kPanel + vector * kLanes);
  }

  static QUIRE_INLINE Ints zero_points(const uint8_t* group, int vector) {
    return __builtin_convertvector(load_bits<Bytes>(group + kZeros + vector * kLanes), Ints) & 0xff;
  }

  // ---- one weight ----

  static void put_code(uint8_t* group, int column, int idx, int code) {
    const int step = idx / kStepBytes, at = column * kStepBytes + idx % kStepBytes;
    if constexpr (kBits == 8) {
      group[step * kStepPanel + at] = uint8_t(code + kShift);
      return;
    }
    uint8_t& low = group[codes_of(step / 2) + at];
    low = uint8_t(step % 2 ? low | code << 4 : code & 15);
    if constexpr (kBits == 5) {
      uint8_t& top = group[tops_of(0) + at];
      top = uint8_t((step ? top : 0) | (code >> 4) << step);
    }
    if constexpr (kBits == 6) {
      uint8_t& top = group[tops_of(step / 2) + at];
      top = uint8_t((step % 4 ? top : 0) | (code >> 4) << (4 + 2 * step) % 8);
    }
  }

  // Stores the codes of a group of a vector of columns, a word of four codes for each step of a column.
  static QUIRE_INLINE void put_steps(uint8_t* group, int column, const Words* steps) {
    const int at = column * kStepBytes;
    if constexpr (kBits == 8) {
      for (int step = 0; step < kSteps; ++step)
        store_bits(group + step * kStepPanel + at, steps[step] ^ (kShift ? 0x80808080u : 0u));
      return;
    }
    constexpr uint32_t kLow = 0x0f0f0f0f;
    for (int pair = 0; pair < kPairs; ++pair)
      store_bits(group + codes_of(pair) + at,
                 (steps[2 * pair] & kLow) | (steps[2 * pair + 1] & kLow) << 4);
    if constexpr (kBits == 5) {
      Words tops{};
      for (int step = 0; step < kSteps; ++step) tops |= ((steps[step] >> 4) & 0x01010101u) << step;
      store_bits(group + tops_of(0) + at, tops);
    }
    if constexpr (kBits == 6) {
      for (int first = 0; first < kSteps; first += 4) {
        Words tops{};
        for (int step = 0; step < 4; ++step) tops |= ((steps[first + step] >> 4) & 0x03030303u) << (4 + 2 * step) % 8;
        store_bits(group + tops_of(first / 2) + at, tops);
      }
    }
  }

  static int code_at(const uint8_t* group, int column, int idx) {
    const int step = idx / kStepBytes, at = column * kStepBytes + idx % kStepBytes;
    if constexpr (kBits == 8) return uint8_t(group[step * kStepPanel + at] - kShift);
    const int low = group[codes_of(step / 2) + at] >> (step % 2 * 4) & 15;
    if constexpr (kBits == 5) return low | (group[tops_of(0) + at] >> step & 1) << 4;
    if constexpr (kBits == 6) return low | (group[tops_of(step / 2) + at] >> (4 + 2 * step) % 8 & 3) << 4;
    return low;
  }
};

// Calls `body` with a null pointer to the form of a number; returns false where none has it. The numbers are those that
// `quire_form_of` gives out.
template <typename Body>
bool with_form(int64_t number, Body body) {
  const auto call = [&](auto* form) {
    body(form);
    return true;
  };
  switch (number) {
#define QUIRE_FORM(number, ...) \
  case number: return call(static_cast<Form<__VA_ARGS__>*>(nullptr));
    QUIRE_FORM(0, 4, 32, BFloat16)
    QUIRE_FORM(1, 4, 32, Float16)
    QUIRE_FORM(2, 4, 32, Float16, true)
    QUIRE_FORM(3, 4, 32, BFloat16, false, true)
    QUIRE_FORM(4, 4, 32, Float16, false, true)
    QUIRE_FORM(5, 4, 32, BFloat16, false, false, true)
    QUIRE_FORM(6, 4, 32, Float16, false, false, true)
    QUIRE_FORM(7, 4, 32, int8_t, false, false, true)
    QUIRE_FORM(8, 4, 32, int8_t, true)
    QUIRE_FORM(9, 4, 16, int8_t, true)
    QUIRE_FORM(10, 4, 16, int8_t)
    QUIRE_FORM(11, 5, 32, Float16)
    QUIRE_FORM(12, 5, 32, Float16, true)
    QUIRE_FORM(13, 5, 32, int8_t, true)
    QUIRE_FORM(14, 6, 16, int8_t)
    QUIRE_FORM(15, 8, 32, BFloat16)
    QUIRE_FORM(16, 8, 32, Float16)
    QUIRE_FORM(17, 8, 32, BFloat16, false, true)
    QUIRE_FORM(18, 8, 32, Float16, false, true)
    QUIRE_FORM(19, 4, 32, float)
    QUIRE_FORM(20, 4, 32, float, false, true)
    QUIRE_FORM(21, 8, 32, float)
    QUIRE_FORM(22, 8, 32, float, false, true)
    QUIRE_FORM(23, 6, 32, BFloat16)
    QUIRE_FORM(24, 8, 16, BFloat16)
#undef QUIRE_FORM
    case 25: return call(static_cast<Float8Form<16>*>(nullptr));
    case 26: return call(static_cast<Float8Form<32>*>(nullptr));
    case 27: return call(static_cast<Float8Form<128>*>(nullptr));
    default: return false;
  }
}

constexpr int kNumForms = 28;

}  // namespace
