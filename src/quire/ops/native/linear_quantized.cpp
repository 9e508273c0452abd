// Linear layers on stored quantised weights: as checkpoints have them, in the forms of grouped_form.h.
#include "gguf_blocks.h"
#include "grouped_rows.h"

namespace {

// Columns of a weight that have one form. See `QuantizedKernels` in native_quantized.py.
struct Segment {
  int64_t form;
  int64_t num_columns;
  int64_t offset;
  const int8_t* levels;  // [16], or null
  const uint8_t* panels;
};

struct QuantizedWeight {
  int64_t num_segments;
  const Segment* segments;
  int64_t num_slices;  // of the inputs, whose sums are added as a tree; see `num_slices_of`
};

// Packs what the groups of columns share: columns that follow each other, as rows do from `row` on.
template <typename Form>
void pack_factors(const UnpackedRows& rows, int64_t row, int64_t width, int column, int num_columns, uint8_t* panel) {
  using Scale = typename Form::Scale;
  const int64_t num_groups = width / Form::kGroup;
  for (int64_t group = 0; group < num_groups; ++group) {
    auto* to = const_cast<uint8_t*>(Form::group_of(panel, int(group)));
    const int64_t first = row * num_groups + group;
    // Copies the value of each column's group, of which there are some in a row, to places that follow each other.
    const auto copy = [&](const auto* from, int64_t idx, int64_t in_row, uint8_t* place) {
      for (int lane = 0; lane < num_columns; ++lane)
        std::memcpy(place + (column + lane) * sizeof(*from), from + idx + lane * in_row, sizeof(*from));
    };
    if constexpr (Form::kIsTwoLevel) {
      if (group % Form::kSuperGroups == 0) {
        auto* super = const_cast<uint8_t*>(Form::super_of(panel, int(group)));
        const int64_t in_row = num_groups / Form::kSuperGroups;
        copy(rows.super_scales, first / Form::kSuperGroups, in_row, super);
        if constexpr (Form::kHasMins)
          copy(rows.super_mins, first / Form::kSuperGroups, in_row, super + kPanel * sizeof(uint16_t));
      }
    }
    copy(static_cast<const Scale*>(rows.scales), first, num_groups, to + Form::kScales);
    if constexpr (Form::kHasMins) copy(static_cast<const Scale*>(rows.mins), first, num_groups, to + Form::kMins);
    if constexpr (Form::kHasZeros) copy(rows.zero_points, first, num_groups, to + Form::kZeros);
  }
}

// Packs the codes of a column, from a group on.
template <typename Form>
void pack_column(const uint8_t* codes, int group, int num_groups, int column, uint8_t* panel) {
  for (; group < num_groups; ++group) {
    uint8_t* to = const_cast<uint8_t*>(Form::group_of(panel, group));
    for (int value = 0; value < Form::kGroup; ++value)
      Form::put_code(to, column, value, codes[group * Form::kGroup + value]);
  }
}

// Packs the codes of a vector of columns, which follow each other: words of four codes are transposed.
template <typename Form>
void pack_columns_of_vector(const uint8_t* codes, int64_t width, int column, uint8_t* panel) {
  constexpr int kWordsAtOnce = std::max(kLanes, Form::kGroup / 4), kGroups = kWordsAtOnce * 4 / Form::kGroup;
  const int num_groups = int(width / Form::kGroup);
  int group = 0;
  for (; group + kGroups <= num_groups; group += kGroups) {
    Words words[kWordsAtOnce];
    for (int first = 0; first < kWordsAtOnce; first += kLanes) {
      Words square[kLanes];
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes; ++lane)
        square[lane] = load_bits<Words>(codes + lane * width + group * Form::kGroup + 4 * first);
      transpose(square);
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes; ++lane) words[first + lane] = square[lane];
    }
    for (int idx = 0; idx < kGroups; ++idx)
      Form::put_steps(const_cast<uint8_t*>(Form::group_of(panel, group + idx)), column,
                      words + idx * Form::kGroup / 4);
  }
  for (int lane = 0; lane < kLanes; ++lane)
    pack_column<Form>(codes + lane * width, group, num_groups, column + lane, panel);
}

// Rows to pack, and the columns of panels that hold them.
struct PackedRange {
  int64_t first, num_rows, width, offset, count;
  uint8_t* panels;
};

// Codes that a thread packs at least, which takes a millisecond. Threads of a region wait for one another, and while
// one has no core, the wait is longer than packing: a model of hundreds of small weights took ten times as long.
constexpr int64_t kCodesOfThread = int64_t(1) << 22;

// Packs rows. `make_source()` gives each thread a function of its own that takes a row, counted from the first, and a
// number of rows, and returns unpacked rows with the place of that row among them.
template <typename MakeSource>
void pack_panels(int64_t form, const PackedRange& range, MakeSource make_source) {
  const int64_t begin_panel = range.first / range.count;
  const int64_t end_panel = (range.first + range.num_rows + range.count - 1) / range.count;
  const auto pack_part = [&](int64_t begin, int64_t end) {
    auto source = make_source();
    with_form(form, [&](auto* null) {
      using Form = std::remove_pointer_t<decltype(null)>;
      for (int64_t panel = begin_panel + begin; panel < begin_panel + end; ++panel) {
        uint8_t* to = range.panels + panel * Form::panel_bytes(range.width);
        const int64_t stop = std::min(range.first + range.num_rows, (panel + 1) * range.count);
        for (int64_t row = std::max(range.first, panel * range.count); row < stop;) {
          const int column = int(range.offset + row - panel * range.count);
          const bool is_vector = column % kLanes == 0 && row + kLanes <= stop;
          const int num_packed = is_vector ? kLanes : 1;
          const auto [rows, at] = source(row - range.first, num_packed);
          const uint8_t* codes = rows.codes + at * range.width;
          if (is_vector)
            pack_columns_of_vector<Form>(codes, range.width, column, to);
          else
            pack_column<Form>(codes, 0, int(range.width / Form::kGroup), column, to);
          pack_factors<Form>(rows, at, range.width, column, num_packed, to);
          row += num_packed;
        }
      }
    });
  };
  quire::in_parallel(end_panel - begin_panel, std::max<int64_t>(1, kCodesOfThread / (range.count * range.width)),
                     pack_part);
}

// The weights of a column, in the order of operations that the form defines.
template <typename Form, typename T>
void dequantize_column(const Segment& segment, int64_t width, const uint8_t* panel, int column, T* to) {
  using Scale = typename Form::Scale;
  for (int group = 0; group < width / Form::kGroup; ++group) {
    const uint8_t* from = Form::group_of(panel, group);
    float scale = widen(reinterpret_cast<const Scale*>(from + Form::kScales)[column]), minimum = 0.0f;
    if constexpr (Form::kHasMins) minimum = widen(reinterpret_cast<const Scale*>(from + Form::kMins)[column]);
    if constexpr (Form::kIsTwoLevel) {
      const auto* super = reinterpret_cast<const Float16*>(Form::super_of(panel, group));
      scale = widen(super[column]) * scale;
      if constexpr (Form::kHasMins) minimum = widen(super[kPanel + column]) * minimum;
    }
    int zero = int(segment.offset);
    if constexpr (Form::kHasZeros) zero += from[Form::kZeros + column];
    for (int value = 0; value < Form::kGroup; ++value, ++to) {
      const int code = Form::code_at(from, column, value);
      const float level = Form::kIsFloat8    ? kFloat8Values[code]
                          : Form::kHasLevels ? float(segment.levels[code])
                                             : float(code - zero);
      // Rounded by itself, as the form defines it: not part of a fused subtraction.
      const volatile float product = scale * level;
      narrow(to, product - minimum);
    }
  }
}

}  // namespace

// The number of a form, -1 where there is no kernel for it. scale: 0 for bfloat16, 1 for float16, 2 for two levels, 3
// for float32. levels: 0 for codes less an offset, 1 for a table, 2 for e4m3.
QUIRE_EXPORT int64_t quire_form_of(int64_t bits, int64_t group, int64_t scale, bool has_mins, bool has_zero_points,
                                   int64_t levels) {
  for (int64_t number = 0; number < kNumForms; ++number) {
    bool is_found = false;
    with_form(number, [&](auto* null) {
      using Form = std::remove_pointer_t<decltype(null)>;
      using Scale = typename Form::Scale;
      const int kind = Form::kIsTwoLevel                ? 2
                       : std::is_same_v<Scale, Float16> ? 1
                       : std::is_same_v<Scale, float>   ? 3
                                                        : 0;
      is_found = Form::kBits == bits && Form::kGroup == group && kind == scale && Form::kHasMins == has_mins &&
                 Form::kHasZeros == has_zero_points && (Form::kIsFloat8 ? 2 : Form::kHasLevels) == levels;
    });
    if (is_found) return number;
  }
  return -1;
}

// The bytes of the panels of a weight.
QUIRE_EXPORT int64_t quire_bytes_quantized(int64_t form, int64_t num_columns, int64_t width) {
  int64_t num_bytes = 0;
  with_form(form, [&](auto* null) {
    num_bytes = num_panels(int(num_columns)) * std::remove_pointer_t<decltype(null)>::panel_bytes(width);
  });
  return num_bytes;
}

// Packs rows [num_rows, width] into panels. The columns of a panel from `offset` on, `count` of them, hold rows that
// follow each other; the first one is row `first` of all that are packed so. Other columns are not written.
QUIRE_EXPORT void quire_pack_quantized(int64_t form, const UnpackedRows* rows, int64_t first, int64_t num_rows,
                                       int64_t width, int64_t offset, int64_t count, uint8_t* panels) {
  const auto take = [=](int64_t row, int) { return std::pair{*rows, row}; };
  pack_panels(form, {first, num_rows, width, offset, count, panels}, [&] { return take; });
}

// The same for rows of blocks of a GGUF file, which are unpacked a vector of rows at a time. Returns false, and nothing
// is written, for blocks of another type.
QUIRE_EXPORT bool quire_pack_blocks(int64_t form, const BlockRows* rows, int64_t first, int64_t num_rows, int64_t width,
                                    int64_t offset, int64_t count, uint8_t* panels) {
  if (block_type_of(rows->type_id) == nullptr) return false;
  pack_panels(form, {first, num_rows, width, offset, count, panels}, [&] {
    return [unpacker = BlockUnpacker(*rows, width, kLanes)](int64_t row, int num_rows) mutable {
      return std::pair{unpacker.unpack(row, num_rows), int64_t(0)};
    };
  });
  return true;
}

// Multiplies rows [num_rows, width] by a weight; bias and residual may be null. A gated weight is one segment.
QUIRE_EXPORT void quire_linear_quantized(Type type, const void* x, int64_t row_stride, int64_t num_rows,
                                         const QuantizedWeight* weight, int64_t num_columns, int64_t width,
                                         const void* bias, const void* residual, Activation gate, void* output) {
  with_type(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    int64_t column = 0;
    const auto from = [&](const void* values) {
      return values == nullptr ? nullptr : static_cast<const T*>(values) + column;
    };
    for (int64_t idx = 0; idx < weight->num_segments; ++idx) {
      const Segment& segment = weight->segments[idx];
      const Operands operands{
          x,    row_stride, from(bias), from(residual), static_cast<T*>(output) + column, int(segment.num_columns),
          gate, num_columns};
      with_form(segment.form, [&](auto* form) {
        using Form = std::remove_pointer_t<decltype(form)>;
        if constexpr (Form::kIsFloat8)
          multiply_float8<Form, T>(operands, num_rows, int(width), segment.panels);
        else
          multiply_grouped<Form, T>(operands, num_rows, int(width),
                                    {segment.panels, segment.levels, int(segment.offset), int(weight->num_slices)});
      });
      column += segment.num_columns;
    }
  });
}

// Looks columns of a weight up: ids [num_ids] to output [num_ids, width]. Returns false for an id that is none.
QUIRE_EXPORT bool quire_rows_quantized(Type type, const QuantizedWeight* weight, int64_t num_columns, int64_t width,
                                       const int64_t* ids, int64_t num_ids, void* output) {
  if (!std::all_of(ids, ids + num_ids, [=](int64_t id) { return id >= 0 && id < num_columns; })) return false;
  with_type(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    quire::in_parallel(num_ids, 8, [&](int64_t begin, int64_t end) {
      for (int64_t idx = begin; idx < end; ++idx) {
        const Segment* segment = weight->segments;
        int64_t column = ids[idx];
        for (; column >= segment->num_columns; ++segment) column -= segment->num_columns;
        with_form(segment->form, [&](auto* form) {
          using Form = std::remove_pointer_t<decltype(form)>;
          const uint8_t* panel = segment->panels + column / kPanel * Form::panel_bytes(width);
          dequantize_column<Form>(*segment, width, panel, int(column % kPanel), static_cast<T*>(output) + idx * width);
        });
      }
    });
  });
  return true;
}
