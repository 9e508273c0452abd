// Adapters of linear layers as the caller describes them.
#pragma once

#include "linear_call.h"

namespace {

// The matrix B of one part of a layer.
struct LoraPart {
  const void* panels;  // [panels, steps of ranks, columns of a panel, values of a step], zeros behind the last rank
  int64_t rank;
  int64_t first_rank;  // its ranks among those of A
  int64_t first_column;
  int64_t num_columns;
};

// An adapter's matrices of one layer. Behind the width, A has zeros.
struct LoraWeight {
  const void* a;      // [num_ranks / ranks side by side, vectors of the width, these ranks, values of a vector]
  int64_t num_ranks;  // of all parts, rounded up by ranks of zeros to a multiple of those that lie side by side
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

// The rows of a step that have an adapter. A layer is given either all rows of the step, or its output rows alone.
struct StepAdapters {
  const LoraRows* all;     // null where no row has an adapter
  const LoraRows* output;  // null where no output row has one, or all rows are output rows
  int64_t num_rows;        // number of all rows

  const LoraRows* at(int64_t given_rows) const { return given_rows == num_rows ? all : output; }
};

// A linear layer with adapters, as fused layers take it: `packed` of a `Linear` whose kernel is `quire_adapted_linear`.
struct AdaptedLinear {
  Linear linear;
  const LoraTable* table;
  const StepAdapters* step;
};

}  // namespace

QUIRE_EXPORT void quire_adapted_linear(Type type, const void* x, int64_t row_stride, int64_t num_rows,
                                       const AdaptedLinear* adapted, int64_t num_columns, int64_t width,
                                       const void* bias, const void* residual, Activation gate, void* output);
