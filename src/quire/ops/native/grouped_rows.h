// Products of rows of int8 and weights whose groups of inputs share a scale.
//
// Within a group, sums are whole numbers and exact; each is scaled by the group's scale in the weight and by that of
// its inputs. Groups are added up one after the other in float32, whatever rows there are: a row gets the same bits in
// every batch.
#pragma once

#include "group_sums.h"

namespace {

// Rows of a tile: their sums of a group and those of all groups stay in registers.
constexpr int kGroupRows = 3;
// Rows of a tile whose weights are unpacked and whose sums of a group are one vector of 16 bits: of 16 registers, the
// sums of a group take eight, and those of all groups are in memory.
constexpr int kShortGroupRows = 4;
// Slices of the inputs, at most, and the depth of the tree of their sums.
constexpr int kMaxSlices = 4, kMaxSliceLevels = 2;

// Returns the number of rows up to which a tile is faster than memory.
template <typename Form>
constexpr int streamed_rows() {
  return is_wide<Form>() ? 0 : 1;
}

// Returns the number of rows up to which weights are unpacked as they are multiplied. Bytes are unpacked already; codes
// of four bits cost least of the others.
template <typename Form>
constexpr int packed_rows() {
  if (is_short<Form>() || (is_wide<Form>() && kLanes == 8)) return 12;
  const bool is_cheap = Form::kBits % 4 == 0 && !Form::kHasLevels && !is_wide<Form>();
  return is_cheap ? kJobRows : 2 * kGroupRows;
}

// Some rows, from a group on that is the first of a super-group. Each field is where the first row's begin.
struct RowsOfGroups {
  const int8_t* values;
  const float* scales;      // of groups
  const int32_t* sums;      // of the values of groups
  const int32_t* starts;    // the same for `add_short_group`, or null
  const int16_t* wide;      // the values for `add_wide_group`, or null
  int width, num_groups;    // of a whole row
};

// Adds the products of some groups to the sums [rows, kPanel].
//
// from: the groups, at the start of a super-group.
// unpacked: their weights as bytes, if they are to be taken from there.
// ahead: what is fetched meanwhile.
template <typename Form, int kRows, bool kIsUnpacked>
void multiply_groups(const RowsOfGroups& x, const uint8_t* from, const uint8_t* unpacked, int num_groups, int offset,
                     const Levels& levels, PanelPrefetch ahead, float* sums) {
  using Adder = SumsOf<Form>;
  constexpr bool kIsShort = !std::is_same_v<typename Adder::Sum, Ints>;
  constexpr bool kHasStarts = kIsUnpacked && is_short<Form>(), kIsWide = kIsUnpacked && is_wide<Form>();
  constexpr int kFlushPairs = std::min(Form::kPairs, Adder::kMostSteps / 2);
  static_assert(kFlushPairs > 0 && Form::kPairs % kFlushPairs == 0);
  Floats totals[kRows][kTileVectors];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector)
      totals[row][vector] = load(sums + row * kPanel + vector * kLanes);
  // Of two levels, the sums of a super-group, before its super-scale and super-minimum.
  [[maybe_unused]] Floats scaled[kRows][kTileVectors], lowered[kRows][kTileVectors];
  for (int group = 0; group < num_groups; ++group, from += Form::kGroupBytes) {
    if (Form::kIsTwoLevel && group % Form::kSuperGroups == 0) {
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int vector = 0; vector < kTileVectors; ++vector) scaled[row][vector] = lowered[row][vector] = Floats{};
    }
    const int8_t* const values = x.values + group * Form::kGroup;
    const float* const input_scales = x.scales + group;
    const int32_t* const value_sums = x.sums + group;
    Ints products[kRows][kTileVectors];
    if constexpr (kHasStarts) {
      ahead.step();
      add_short_group<Form, kRows>(values, x.width, unpacked + group * Form::kSteps * kStepPanel, x.starts + group,
                                   x.num_groups, products);
    }
    if constexpr (!kIsShort) {
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int vector = 0; vector < kTileVectors; ++vector)
          products[row][vector] = Ints{} - offset * value_sums[row * x.num_groups];
    }
    if constexpr (kIsWide) {
      ahead.step();
      add_wide_group<Form, kRows>(x.wide + group * Form::kGroup, x.width,
                                  unpacked + group * Form::kSteps * unpacked_step<Form>(), products);
    }
#pragma GCC unroll 1
    for (int begin = kHasStarts || kIsWide ? Form::kPairs : 0; begin < Form::kPairs; begin += kFlushPairs) {
      typename Adder::Sum parts[kRows][kTileVectors];
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int vector = 0; vector < kTileVectors; ++vector) {
          if constexpr (kIsShort)
            parts[row][vector] = typename Adder::Sum{};
          else
            parts[row][vector] = products[row][vector];
        }
      // Unrolled, the compiler adds up the products in an order that takes more registers than there are.
#pragma GCC unroll 1
      for (int pair = begin; pair < begin + kFlushPairs; ++pair) {
        Ints weights[2][kTileVectors];  // of both steps
#pragma GCC unroll 4
        for (int vector = 0; vector < kTileVectors; ++vector) {
          if constexpr (kIsUnpacked) {
            const uint8_t* steps =
                unpacked + (group * Form::kSteps + 2 * pair) * kStepPanel + vector * kLanes * kStepBytes;
            weights[0][vector] = load_bits<Ints>(steps);
            weights[1][vector] = load_bits<Ints>(steps + kStepPanel);
          } else {
            Form::unpack_pair(from, pair, vector, weights[0][vector], weights[1][vector]);
            if constexpr (Form::kHasLevels) {
              weights[0][vector] = levels.look_up(weights[0][vector]);
              weights[1][vector] = levels.look_up(weights[1][vector]);
            }
          }
        }
        ahead.step();
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
          for (int step = 0; step < 2; ++step) {
            const Ints value = broadcast(values + row * x.width + (2 * pair + step) * kStepBytes);
#pragma GCC unroll 4
            for (int vector = 0; vector < kTileVectors; ++vector)
              Adder::add(parts[row][vector], weights[step][vector], value);
          }
        }
      }
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int vector = 0; vector < kTileVectors; ++vector) {
          const Ints total = Adder::total(parts[row][vector]);
          products[row][vector] = kIsShort && begin > 0 ? products[row][vector] + total : total;
        }
    }
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector) {
      const Floats scale = Form::scales(from, vector);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        Ints whole = products[row][vector];
        if constexpr (kIsShort && !kHasStarts) whole -= offset * value_sums[row * x.num_groups];
        if constexpr (Form::kHasZeros) whole -= Form::zero_points(from, vector) * value_sums[row * x.num_groups];
        (Form::kIsTwoLevel ? scaled : totals)[row][vector] +=
            __builtin_convertvector(whole, Floats) * (scale * input_scales[row * x.num_groups]);
      }
      if constexpr (Form::kHasMins) {
        const Floats minimum = Form::mins(from, vector);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          const Floats taken = minimum * (float(value_sums[row * x.num_groups]) * input_scales[row * x.num_groups]);
          if constexpr (Form::kIsTwoLevel)
            lowered[row][vector] += taken;
          else
            totals[row][vector] -= taken;
        }
      }
    }
    if (Form::kIsTwoLevel && group % Form::kSuperGroups == Form::kSuperGroups - 1) {
      const uint8_t* super = from + Form::kGroupBytes;
      from += Form::kSuperBytes;
#pragma GCC unroll 4
      for (int vector = 0; vector < kTileVectors; ++vector) {
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          totals[row][vector] += scaled[row][vector] * Form::super_scales(super, vector);
          if constexpr (Form::kHasMins) totals[row][vector] -= lowered[row][vector] * Form::super_mins(super, vector);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < kTileVectors; ++vector)
      store(sums + row * kPanel + vector * kLanes, totals[row][vector]);
}

// Adds values [count], a multiple of the lanes, to others.
QUIRE_INLINE void add_floats(const float* from, int count, float* to) {
  for (int idx = 0; idx < count; idx += kLanes) store(to + idx, load(from + idx) + load(to + idx));
}

// Returns the number of slices of the inputs, at most those wanted and a power of two: equal ones, of whole groups or
// super-groups. Their sums are added as a tree of halves. A half of the inputs has half of the tree, so ranks that have
// parts of the inputs, and half as many slices, add up to the same bits.
template <typename Form>
int num_slices_of(int num_groups, int wanted) {
  constexpr int kUnit = Form::kIsTwoLevel ? Form::kSuperGroups : 1;
  int slices = std::min(wanted, kMaxSlices);
  while (slices > 1 && num_groups % (slices * kUnit) != 0) slices /= 2;
  return slices;
}

// Sums [num_rows, kPanel] of the rows from `first` on and the columns of one panel.
//
// starts, wide: start values of the sums of 16 bits, as many as sums of values; values of 16 bits; null where none are
// needed.
// kIsUnpacked: to unpack a code of more than four bits costs a tile more than its products do; for several tiles bytes
// are made of them once.
template <typename Form, bool kIsUnpacked>
void multiply_panel(const Int8Rows<Form::kGroup>& rows, const int32_t* starts, const int16_t* wide,
                    const GroupedWeight& weight, const Levels& levels, const uint8_t* panel, int64_t first,
                    int num_rows, float* sums) {
  constexpr int kUnpackedGroups = Form::kSuperGroups;
  alignas(64) uint8_t unpacked[kIsUnpacked ? kUnpackedGroups * Form::kSteps * unpacked_step<Form>() : 1];
  const int offset = weight.whole_offset<Form>();
  constexpr bool kHasStarts = kIsUnpacked && is_short<Form>(), kIsWide = kIsUnpacked && is_wide<Form>();
  // Half the bytes a step, or about: twice the steps of a piece. Bytes that several tiles read stay in the first-level
  // cache.
  const int packed_groups = 2 * (num_rows <= kFewPieceRows ? kPieceSteps : kLongPieceSteps) / Form::kSteps;
  const bool is_short_piece = kIsUnpacked || (Form::kBits == 8 && num_rows > kGroupRows);
  const int piece = is_short_piece ? kUnpackedGroups : packed_groups;
  const int slices = num_slices_of<Form>(rows.num_groups, weight.num_slices);
  alignas(64) float halves[kMaxSliceLevels][kJobRows * kPanel];  // sums that wait for those of the other half
  for (int slice = 0; slice < slices; ++slice) {
    std::fill_n(sums, num_rows * kPanel, 0.0f);
    const int begin = slice * (rows.num_groups / slices), end = begin + rows.num_groups / slices;
    for (int group = begin; group < end; group += piece) {
      const int count = std::min(piece, end - group), num_bytes = int(Form::bytes_of(count));
      const uint8_t* from = panel + Form::bytes_of(group);
      if constexpr (kIsUnpacked) unpack_groups<Form>(from, count, levels, unpacked);
      in_tiles<kHasStarts ? kShortGroupRows : kGroupRows>(num_rows, [&](int row, auto tile_rows) {
        const int num_steps = kHasStarts || kIsWide ? count : count * Form::kPairs;
        const PanelPrefetch ahead(from + num_bytes, num_bytes, num_steps, row, tile_rows.value, num_rows,
                                  num_rows <= streamed_rows<Form>());
        const int64_t at = first + row, place = at * rows.num_groups + group;
        const int64_t value = at * rows.width + group * Form::kGroup;
        const RowsOfGroups x{rows.values.get() + value, rows.scales.get() + place, rows.sums.get() + place,
                             kHasStarts ? starts + place : nullptr, kIsWide ? wide + value : nullptr,
                             rows.width, rows.num_groups};
        multiply_groups<Form, tile_rows.value, kIsUnpacked>(x, from, unpacked, count, offset, levels, ahead,
                                                            sums + row * kPanel);
      });
    }
    // Adds the sums of the slices before, as far as this slice's half is whole, and keeps them for the other half.
    int level = 0;
    for (int rest = slice; rest % 2 == 1; rest /= 2) add_floats(halves[level++], num_rows * kPanel, sums);
    if (slice + 1 < slices) std::copy_n(sums, num_rows * kPanel, halves[level]);
  }
}

// Multiplies rows by a weight of a form, and finishes them.
template <typename Form, typename T>
void multiply_grouped(const Operands& operands, int64_t num_rows, int width, const GroupedWeight& weight) {
  const Int8Rows<Form::kGroup> rows(static_cast<const T*>(operands.x), operands.row_stride, num_rows, width);
  std::unique_ptr<int32_t[]> starts;
  std::unique_ptr<int16_t[]> wide;
  const bool is_unpacked = num_rows > packed_rows<Form>();
  if (is_wide<Form>() && is_unpacked) wide = widen_steps(rows.values.get(), num_rows * rows.width / kStepBytes);
  if (is_short<Form>() && is_unpacked) {
    starts.reset(new int32_t[num_rows * rows.num_groups]);
    for (int64_t idx = 0; idx < num_rows * rows.num_groups; ++idx)
      starts[idx] = short_start(-weight.whole_offset<Form>() * rows.sums[idx]);
  }
  const Levels levels(weight.levels);
  in_blocks<kPanel>(operands.num_columns, num_rows, [&](int number, int64_t first, int count) {
    alignas(64) float sums[kJobRows * kPanel];
    const uint8_t* panel = weight.panels + number * Form::panel_bytes(width);
    if (count > packed_rows<Form>())
      multiply_panel<Form, true>(rows, starts.get(), wide.get(), weight, levels, panel, first, count, sums);
    else
      multiply_panel<Form, false>(rows, nullptr, nullptr, weight, levels, panel, first, count, sums);
    for (int row = 0; row < count; ++row) finish<T>(sums + row * kPanel, operands, first + row, number);
  });
}

}  // namespace
