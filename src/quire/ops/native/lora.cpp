// Low-rank adapters: the products of rows with the two matrices of their adapter, for all adapters of a step at once.
//
//     h = A x                A [ranks, width]; the matrices of all parts of a layer lie in one
//     y = residual + B h     B [columns, rank] of each part, added to its own columns
//
// `h` is rounded to the type of the rows. Where the instruction set multiplies pairs of bfloat16, both products do.
//
// Rows come grouped by adapter, so that a matrix is read once for all rows of a group. Adapters of few rows are limited
// by that reading: both matrices are stored in the order in which they are read, and a job prefetches the start of the
// next one. Each sum has one order, whichever other rows there are: a row gets the same bits in every batch.
#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include "cache.h"
#include "gemm.h"
#include "lora.h"
#include "parallel.h"

namespace {

constexpr int kAcross = 4;              // ranks, or vectors of columns, whose sums are computed side by side
constexpr int kLoraColumns = 64;        // columns of a panel of B
constexpr int kGroupRows = 32;          // maximum number of rows of a job
constexpr int kJobRanks = 2 * kAcross;  // ranks of a job that multiplies by A
constexpr int kJobPanels = 8;           // panels of a job that multiplies by B
constexpr int kFillRows = 8;            // rows of a job that copies residuals
// Rows whose sums stay in registers, beside those of four ranks or four vectors of columns.
constexpr int kLoraRows = kRegisters == 32 ? 4 : 2;
// Bytes at the start of a job's matrix that the job before prefetches, until the hardware knows where it is read.
constexpr int kStartBytes = 1024;

// A part of the work: some rows of a group, from a place in `LoraRows::rows` on, and a range of ranks of A or, with a
// part, of panels of its B. Without a weight, rows [begin, end) of the step that no adapter writes to as a whole.
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
  static constexpr int kVector = kLanes * kValues;

  const T* x;
  int64_t row_stride;
  int width;
  const T* residual;
  int64_t num_columns;
  T* output;
  const int64_t* rows;
  const char* is_whole;  // [rows], of those that adapters write to as a whole
  Value* h;              // [rows with an adapter, h_stride], with a value more at the end
  int64_t h_stride;

  // Returns the address of kAcross ranks of A.
  const T* ranks(const LoraWeight& weight, int rank) const {
    return static_cast<const T*>(weight.a) + int64_t(rank) * round_up(width, kVector);
  }

  // Returns the address of a panel of B.
  const T* panel(const LoraPart& part, int idx) const {
    return static_cast<const T*>(part.panels) + int64_t(idx) * round_up(int(part.rank), kValues) * kLoraColumns;
  }

  // Adds the products of a vector of values of each row with kAcross ranks.
  template <int kRows>
  static QUIRE_INLINE void add_products(const T* const* values, const T* a, Floats* sums) {
    Floats columns[kAcross];
#pragma GCC unroll 4
    for (int beside = 0; beside < kAcross; ++beside) columns[beside] = load_values<Steps>(a + beside * kVector);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const Floats value = load_values<Steps>(values[row]);
#pragma GCC unroll 4
      for (int beside = 0; beside < kAcross; ++beside)
        Steps::multiply_add(sums[row * kAcross + beside], value, columns[beside]);
    }
  }

  // Computes kAcross ranks of a few rows.
  template <int kRows>
  void reduce(const LoraWeight& weight, int64_t first, int rank) const {
    constexpr int kSums = round_up(kRows * kAcross, kLanes);
    const T *a = ranks(weight, rank), *values[kRows];
    for (int row = 0; row < kRows; ++row) values[row] = x + rows[first + row] * row_stride;
    Floats sums[kSums];
#pragma GCC unroll 16
    for (int idx = 0; idx < kSums; ++idx) sums[idx] = Floats{};
    int step = 0;
    for (; step + kVector <= width; step += kVector, a += kAcross * kVector) {
      add_products<kRows>(values, a, sums);
      for (int row = 0; row < kRows; ++row) values[row] += kVector;
    }
    if (step < width) {
      T last[kRows][kVector]{};
      for (int row = 0; row < kRows; ++row) {
        std::copy_n(values[row], width - step, last[row]);
        values[row] = last[row];
      }
      add_products<kRows>(values, a, sums);
    }
    float totals[kSums];
    for (int idx = 0; idx < kSums; idx += kLanes) store(totals + idx, rounded<T>(sums_of<kLanes, 1>(sums + idx)));
    for (int row = 0; row < kRows; ++row)
      for (int beside = 0; beside < kAcross; ++beside)
        narrow(h + (first + row) * h_stride + rank + beside, totals[row * kAcross + beside]);
  }

  // Computes kAcross vectors of columns of a panel, from `column` of it on, for a few rows.
  template <int kRows>
  void expand(const LoraPart& part, int idx, int column, int64_t first) const {
    const int depth = int(part.rank + kValues - 1) / kValues;
    const T* from = panel(part, idx) + column * kValues;
    Floats sums[kRows][kAcross];
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int vector = 0; vector < kAcross; ++vector) sums[row][vector] = Floats{};
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
    const int begin = idx * kLoraColumns + column;
    const int count = int(part.num_columns) - begin;
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const int64_t place = rows[first + row] * num_columns + part.first_column + begin;
      if (count >= kAcross * kLanes) {
#pragma GCC unroll 4
        for (int vector = 0; vector < kAcross; ++vector) write(sums[row][vector], place + vector * kLanes);
      } else {
        // A copy, so that the sums above stay in registers.
        const Floats last[kAcross] = {sums[row][0], sums[row][1], sums[row][2], sums[row][3]};
        write_some(last, place, count);
      }
    }
  }

  // Writes sums of a vector of columns, with the residual.
  QUIRE_INLINE void write(Floats sums, int64_t place) const {
    store(output + place, residual == nullptr ? sums : sums + load(residual + place));
  }

  // Writes the sums of `count` columns.
  void write_some(const Floats* sums, int64_t place, int count) const {
    int column = 0;
    for (; column + kLanes <= count; column += kLanes) write(sums[column / kLanes], place + column);
    for (; column < count; ++column) {
      const float sum = sums[column / kLanes][column % kLanes];
      narrow(output + place + column, residual == nullptr ? sum : sum + widen(residual[place + column]));
    }
  }

  // Writes the residual, or zeros, to a row.
  void fill(int64_t row) const {
    T* const to = output + row * num_columns;
    if (residual == nullptr)
      std::fill_n(to, num_columns, T{});
    else
      std::copy_n(residual + row * num_columns, num_columns, to);
  }

  void run(const LoraJob& job) const {
    if (job.weight == nullptr) {
      for (int row = job.begin; row < job.end; ++row)
        if (!is_whole[row]) fill(row);
    } else if (job.part == nullptr) {
      for (int rank = job.begin; rank < job.end; rank += kAcross)
        in_tiles<kLoraRows>(job.num_rows, [&](int row, auto count) {
          reduce<count.value>(*job.weight, job.first + row, rank);
        });
    } else {
      for (int idx = job.begin; idx < job.end; ++idx)
        for (int column = 0; column < kLoraColumns && idx * kLoraColumns + column < job.part->num_columns;
             column += kAcross * kLanes)
          in_tiles<kLoraRows>(job.num_rows, [&](int row, auto count) {
            expand<count.value>(*job.part, idx, column, job.first + row);
          });
    }
  }

  void prefetch(const LoraJob& job) const {
    if (job.weight == nullptr) return;
    const T* const from = job.part == nullptr ? ranks(*job.weight, job.begin) : panel(*job.part, job.begin);
    for (int byte = 0; byte < kStartBytes; byte += 64) fetch(reinterpret_cast<const char*>(from) + byte);
  }
};

// Adds jobs of `count` ranks or panels, `unit` at a time, for the rows of a group.
void add_jobs(const LoraWeight* weight, const LoraPart* part, int64_t first, int64_t last, int count, int unit,
              std::vector<LoraJob>& jobs) {
  for (int begin = 0; begin < count; begin += unit)
    for (int64_t row = first; row < last; row += kGroupRows)
      jobs.push_back(
          {weight, part, row, int(std::min<int64_t>(kGroupRows, last - row)), begin, std::min(count, begin + unit)});
}

// The work of a layer in a step. Jobs before `num_first` are done before any other begins.
struct LoraJobs {
  std::vector<LoraJob> all, second;
  std::vector<char> is_whole;  // rows that adapters write to as a whole
  std::vector<float> h;        // of any type
  int64_t num_first = 0;
  int64_t most_ranks = 0;

  void plan(const LoraTable* table, const LoraRows* step, int64_t num_rows, int64_t num_columns) {
    all.clear();
    second.clear();
    is_whole.assign(num_rows, 0);
    most_ranks = 0;
    int64_t num_whole = 0;
    for (int64_t group = 0; group < step->num_groups; ++group) {
      const LoraWeight* const weight = table->at(step->slots[group]);
      if (weight == nullptr) continue;
      const int64_t first = step->starts[group], last = step->starts[group + 1];
      add_jobs(weight, nullptr, first, last, int(weight->num_ranks), kJobRanks, all);
      int64_t covered = 0;
      for (const LoraPart* part = weight->parts; part < weight->parts + weight->num_parts; ++part) {
        add_jobs(weight, part, first, last, int((part->num_columns + kLoraColumns - 1) / kLoraColumns), kJobPanels,
                 second);
        covered += part->num_columns;
      }
      if (covered == num_columns)
        for (int64_t place = first; place < last; ++place, ++num_whole) is_whole[step->rows[place]] = 1;
      most_ranks = std::max(most_ranks, weight->num_ranks);
    }
    if (num_whole < num_rows)
      for (int64_t row = 0; row < num_rows; row += kFillRows)
        all.push_back({nullptr, nullptr, 0, 0, int(row), int(std::min(num_rows, row + kFillRows))});
    num_first = int64_t(all.size());
    all.insert(all.end(), second.begin(), second.end());
    // The value behind the last rank of a part is multiplied by zero, so it must be a number.
    h.assign(step->starts[step->num_groups] * most_ranks + 1, 0);
  }
};

}  // namespace

// Returns the number of columns of a panel of B.
QUIRE_EXPORT int64_t quire_lora_columns() { return kLoraColumns; }

// Returns the number of ranks of A that lie side by side.
QUIRE_EXPORT int64_t quire_lora_ranks() { return kAcross; }

// Returns the number of values of a vector of A, and of a step of ranks in a panel of B.
QUIRE_EXPORT void quire_lora_values(Type type, int64_t* of_vector, int64_t* of_step) {
  with_type(type, [&](auto* null) {
    using Layer = LoraStep<std::remove_pointer_t<decltype(null)>>;
    *of_vector = Layer::kVector;
    *of_step = Layer::kValues;
  });
}

// Computes what the adapters of rows add to a layer's product: output = residual + B A x, and `residual` (zeros where
// it is null) for rows and columns without an adapter.
//
// x: [num_rows, width], `row_stride` values apart. residual, output: [num_rows, num_columns].
QUIRE_EXPORT void quire_lora(Type type, const void* x, int64_t row_stride, int64_t num_rows, int64_t width,
                             const LoraTable* table, const LoraRows* step, const void* residual, int64_t num_columns,
                             void* output) {
  thread_local LoraJobs jobs;  // its memory is kept for the next layer
  jobs.plan(table, step, num_rows, num_columns);
  with_type(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    using Value = typename LoraStep<T>::Value;
    const LoraStep<T> layer{static_cast<const T*>(x), row_stride, int(width), static_cast<const T*>(residual),
                            num_columns, static_cast<T*>(output), step->rows, jobs.is_whole.data(),
                            reinterpret_cast<Value*>(jobs.h.data()), jobs.most_ranks};
    const std::vector<LoraJob>& all = jobs.all;
    const int64_t count = int64_t(all.size()), num_first = jobs.num_first;
    // Threads take jobs in order: who waits here waits for jobs that others are computing.
    std::atomic<int64_t> num_done{0};
    quire::in_runs(count, [&](int64_t job) {
      if (job + 1 < count) layer.prefetch(all[job + 1]);
      if (job < num_first) {
        layer.run(all[job]);
        num_done.fetch_add(1, std::memory_order_release);
        return;
      }
      for (quire::SpinBackoff backoff; num_done.load(std::memory_order_acquire) < num_first;) backoff.wait();
      layer.run(all[job]);
    });
  });
}

// A linear layer with the adapters of the present step; for the arguments, see `Linear::Kernel`.
QUIRE_EXPORT void quire_adapted_linear(Type type, const void* x, int64_t row_stride, int64_t num_rows,
                                       const AdaptedLinear* adapted, int64_t num_columns, int64_t width,
                                       const void* bias, const void* residual, Activation gate, void* output) {
  const LoraRows* const rows = adapted->step->at(num_rows);
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
