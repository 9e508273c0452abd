// Low-rank adapters: the products of rows with the two matrices of their adapter, for all adapters of a step at once.
//
//     h = A x                A [ranks, width]; the matrices of all parts of a layer lie in one
//     y = residual + B h     B [columns, rank] of each part, added to its own columns
//
// `h` is rounded to the type of the rows. Where the instruction set multiplies pairs of bfloat16, both products do.
//
// Rows come grouped by adapter, so that a matrix is read once for all rows of a group. Each sum has one order,
// whichever other rows there are: a row gets the same bits in every batch.
#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "activation_functions.h"
#include "cache.h"
#include "gemm.h"
#include "linear_call.h"
#include "parallel.h"

namespace {

constexpr int kLoraColumns = 64;  // columns of a panel of B
constexpr int kGroupRows = 32;    // maximum number of rows of a job
constexpr int kJobRanks = 8;      // ranks of a job of the first pass
constexpr int kJobPanels = 8;     // panels of a job of the second pass
// Rows whose sums stay in registers, beside those of four ranks or four vectors of columns.
constexpr int kLoraRows = kRegisters == 32 ? 4 : 2;
constexpr int kAcross = 4;

// The matrix B of one part of a layer.
struct LoraPart {
  const void* panels;  // [panels, steps of ranks, kLoraColumns, values of a step], zeros behind the last rank
  int64_t rank;
  int64_t first_rank;  // its ranks among those of A
  int64_t first_column;
  int64_t num_columns;
};

// An adapter's matrices of one layer.
struct LoraWeight {
  const void* a;  // [num_ranks, width]
  int64_t num_ranks;
  const LoraPart* parts;
  int64_t num_parts;
};

// The matrices of each adapter slot, null where the adapter has none for the layer.
struct LoraTable {
  const LoraWeight* const* weights;
  int64_t num_slots;

  const LoraWeight* at(int64_t slot) const { return slot < num_slots ? weights[slot] : nullptr; }
};

// The rows of a step that have an adapter, grouped by adapter.
struct LoraRows {
  int64_t num_groups;
  const int64_t* slots;   // adapter of each group
  const int64_t* starts;  // [num_groups + 1], places in `rows`
  const int64_t* rows;
};

// A linear layer with adapters, as fused layers take it: `packed` of a `Linear` whose kernel is `quire_adapted_linear`.
struct AdaptedLinear {
  Linear linear;
  const LoraTable* table;
  const LoraRows* const* rows;  // of the present step
};

// A part of the work of a pass: some rows of a group, from a place in `LoraRows::rows` on, and a range of ranks of A or
// of panels of a part's B.
struct LoraJob {
  const LoraWeight* weight;
  const LoraPart* part;
  int64_t first;
  int num_rows;
  int begin;
  int end;
};

// Loads the values of a vector of steps, as they are multiplied.
template <typename Steps, typename T>
QUIRE_INLINE Floats load_values(const T* from) {
  if constexpr (Steps::kValues == 2) {
    return load_bits<Floats>(from);
  } else {
    return load(from);
  }
}

template <typename T>
struct LoraStep {
  using Steps = typename StepsOf<T>::Type;
  using Value = typename Steps::Value;
  static constexpr int kValues = Steps::kValues;

  const T* x;
  int64_t row_stride;
  int width;
  const T* residual;
  int64_t num_columns;
  T* output;
  const int64_t* rows;
  Value* h;  // [rows with an adapter, h_stride], with a value more at the end
  int64_t h_stride;

  // Computes kAcross ranks, or the last one of them repeated, of a few rows.
  template <int kRows>
  void reduce(const LoraJob& job, int64_t first, int rank) const {
    const T *a[kAcross], *from[kRows];
    for (int beside = 0; beside < kAcross; ++beside)
      a[beside] = static_cast<const T*>(job.weight->a) + int64_t(std::min(rank + beside, job.end - 1)) * width;
    for (int row = 0; row < kRows; ++row) from[row] = x + rows[first + row] * row_stride;
    Floats sums[kRows][kAcross]{};
    int step = 0;
    for (; step + kLanes * kValues <= width; step += kLanes * kValues) {
      Floats columns[kAcross];
#pragma GCC unroll 4
      for (int beside = 0; beside < kAcross; ++beside) columns[beside] = load_values<Steps>(a[beside] + step);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const Floats value = load_values<Steps>(from[row] + step);
#pragma GCC unroll 4
        for (int beside = 0; beside < kAcross; ++beside) Steps::multiply_add(sums[row][beside], value, columns[beside]);
      }
    }
    for (int row = 0; row < kRows; ++row)
      for (int beside = 0; beside < kAcross && rank + beside < job.end; ++beside) {
        float sum = sum_of(sums[row][beside])[0];
        for (int last = step; last < width; ++last) sum += widen(from[row][last]) * widen(a[beside][last]);
        narrow(h + (first + row) * h_stride + rank + beside, rounded<T>(sum));
      }
  }

  // The first pass: ranks of A for the rows of a job.
  void reduce(const LoraJob& job) const {
    for (int rank = job.begin; rank < job.end; rank += kAcross)
      in_tiles<kLoraRows>(job.num_rows, [&](int row, auto count) { reduce<count.value>(job, job.first + row, rank); });
  }

  // Computes kAcross vectors of columns of a panel, from `column` of it on, for a few rows.
  template <int kRows>
  void expand(const LoraPart& part, int panel, int column, int64_t first) const {
    const int depth = int(part.rank + kValues - 1) / kValues;
    const T* from = static_cast<const T*>(part.panels) + (int64_t(panel) * depth * kLoraColumns + column) * kValues;
    Floats sums[kRows][kAcross]{};
    for (int step = 0; step < depth; ++step, from += kLoraColumns * kValues) {
      Floats columns[kAcross];
#pragma GCC unroll 4
      for (int vector = 0; vector < kAcross; ++vector)
        columns[vector] = load_values<Steps>(from + vector * kLanes * kValues);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const Floats value = Steps::broadcast(h + (first + row) * h_stride + part.first_rank + step * kValues);
#pragma GCC unroll 4
        for (int vector = 0; vector < kAcross; ++vector) Steps::multiply_add(sums[row][vector], value, columns[vector]);
      }
    }
    const int begin = panel * kLoraColumns + column;
    const int count = std::min(kAcross * kLanes, int(part.num_columns) - begin);
    for (int row = 0; row < kRows; ++row) {
      const int64_t place = rows[first + row] * num_columns + part.first_column + begin;
      alignas(64) float values[kAcross * kLanes];
      for (int vector = 0; vector < kAcross; ++vector) store(values + vector * kLanes, sums[row][vector]);
      int idx = 0;
      for (; idx + kLanes <= count; idx += kLanes) {
        const Floats value = load(values + idx);
        store(output + place + idx, residual == nullptr ? value : value + load(residual + place + idx));
      }
      for (; idx < count; ++idx)
        narrow(output + place + idx, residual == nullptr ? values[idx] : values[idx] + widen(residual[place + idx]));
    }
  }

  // The second pass: panels of B for the rows of a job.
  void expand(const LoraJob& job) const {
    for (int panel = job.begin; panel < job.end; ++panel)
      for (int column = 0; column < kLoraColumns && panel * kLoraColumns + column < job.part->num_columns;
           column += kAcross * kLanes)
        in_tiles<kLoraRows>(job.num_rows, [&](int row, auto count) {
          expand<count.value>(*job.part, panel, column, job.first + row);
        });
  }

  // Writes the residual, or zeros, to a row that no adapter writes to as a whole.
  void fill(int64_t row) const {
    T* const to = output + row * num_columns;
    if (residual == nullptr)
      std::fill_n(to, num_columns, T{});
    else
      std::copy_n(residual + row * num_columns, num_columns, to);
  }
};

// Adds the jobs of a pass over `count` ranks or panels, `unit` at a time, for the rows of a group.
void add_jobs(const LoraWeight* weight, const LoraPart* part, int64_t first, int64_t last, int count, int unit,
              std::vector<LoraJob>& jobs) {
  for (int begin = 0; begin < count; begin += unit)
    for (int64_t row = first; row < last; row += kGroupRows)
      jobs.push_back(
          {weight, part, row, int(std::min<int64_t>(kGroupRows, last - row)), begin, std::min(count, begin + unit)});
}

}  // namespace

// Returns the number of columns of a panel of B.
QUIRE_EXPORT int64_t quire_lora_columns() { return kLoraColumns; }

// Returns the number of values of a step of ranks in a panel of B.
QUIRE_EXPORT int64_t quire_lora_values(Type type) {
  int values = 1;
  with_type(type, [&](auto* null) { values = LoraStep<std::remove_pointer_t<decltype(null)>>::kValues; });
  return values;
}

// Computes what the adapters of rows add to a layer's product: output = residual + B A x, and `residual` (zeros where
// it is null) for rows and columns without an adapter.
//
// x: [num_rows, width], `row_stride` values apart. residual, output: [num_rows, num_columns].
QUIRE_EXPORT void quire_lora(Type type, const void* x, int64_t row_stride, int64_t num_rows, int64_t width,
                             const LoraTable* table, const LoraRows* step, const void* residual, int64_t num_columns,
                             void* output) {
  std::vector<LoraJob> reductions, expansions;
  std::vector<char> is_whole(num_rows, 0);
  int64_t most_ranks = 0, num_whole = 0;
  for (int64_t group = 0; group < step->num_groups; ++group) {
    const LoraWeight* const weight = table->at(step->slots[group]);
    if (weight == nullptr) continue;
    const int64_t first = step->starts[group], last = step->starts[group + 1];
    add_jobs(weight, nullptr, first, last, int(weight->num_ranks), kJobRanks, reductions);
    int64_t covered = 0;
    for (const LoraPart* part = weight->parts; part < weight->parts + weight->num_parts; ++part) {
      const int num_panels = int((part->num_columns + kLoraColumns - 1) / kLoraColumns);
      add_jobs(weight, part, first, last, num_panels, kJobPanels, expansions);
      covered += part->num_columns;
    }
    if (covered == num_columns)
      for (int64_t place = first; place < last; ++place, ++num_whole) is_whole[step->rows[place]] = 1;
    most_ranks = std::max(most_ranks, weight->num_ranks);
  }
  with_type(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    // The value behind the last rank of a part is multiplied by zero, so it must be a number.
    const std::unique_ptr<typename LoraStep<T>::Value[]> h(
        new typename LoraStep<T>::Value[step->starts[step->num_groups] * most_ranks + 1]());
    const LoraStep<T> layer{static_cast<const T*>(x), row_stride,  int(width),
                            static_cast<const T*>(residual), num_columns, static_cast<T*>(output),
                            step->rows, h.get(), most_ranks};
    quire::together([&] {
      quire::in_runs(int64_t(reductions.size()), [&](int64_t job) { layer.reduce(reductions[job]); });
      if (num_whole < num_rows)
        quire::in_parallel(num_rows, 8, [&](int64_t begin, int64_t end) {
          for (int64_t row = begin; row < end; ++row)
            if (!is_whole[row]) layer.fill(row);
        });
      quire::in_runs(int64_t(expansions.size()), [&](int64_t job) { layer.expand(expansions[job]); });
    });
  });
}

// A linear layer with the adapters of the present step; for the arguments, see `Linear::Kernel`.
QUIRE_EXPORT void quire_adapted_linear(Type type, const void* x, int64_t row_stride, int64_t num_rows,
                                       const AdaptedLinear* adapted, int64_t num_columns, int64_t width,
                                       const void* bias, const void* residual, Activation gate, void* output) {
  const LoraRows* const rows = *adapted->rows;
  bool has_any = false;
  for (int64_t group = 0; rows != nullptr && group < rows->num_groups; ++group)
    has_any |= adapted->table->at(rows->slots[group]) != nullptr;
  thread_local std::vector<float> added;  // of any type; kept for the next layer
  if (has_any) {
    added.resize(std::max<size_t>(added.size(), num_rows * num_columns));
    quire_lora(type, x, row_stride, num_rows, width, adapted->table, rows, residual, num_columns, added.data());
    residual = added.data();
  }
  const Linear& linear = adapted->linear;
  linear.kernel(type, x, row_stride, num_rows, linear.packed, num_columns, width, bias, residual, gate, output);
}
